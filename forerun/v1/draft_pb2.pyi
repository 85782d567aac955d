from forerun.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftParams(_message.Message):
    __slots__ = ("sampling", "remaining", "end_token_ids", "vocab_size", "ends_from")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENDS_FROM_FIELD_NUMBER: _ClassVar[int]
    sampling: _common_pb2.Sampling
    remaining: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    ends_from: int
    def __init__(self, sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., remaining: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., ends_from: _Optional[int] = ...) -> None: ...

class Sync(_message.Message):
    __slots__ = ("seq", "base_len", "tokens", "want", "params", "traceparent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    want: int
    params: DraftParams
    traceparent: str
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., want: _Optional[int] = ..., params: _Optional[_Union[DraftParams, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("seq", "traceparent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    traceparent: str
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class DraftCommand(_message.Message):
    __slots__ = ("sync", "close")
    SYNC_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    sync: Sync
    close: Close
    def __init__(self, sync: _Optional[_Union[Sync, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Hint(_message.Message):
    __slots__ = ("base_len", "tail", "tree", "traceparent")
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    base_len: int
    tail: _containers.RepeatedScalarFieldContainer[int]
    tree: _common_pb2.Tree
    traceparent: str
    def __init__(self, base_len: _Optional[int] = ..., tail: _Optional[_Iterable[int]] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class HintEnvelope(_message.Message):
    __slots__ = ("seq", "hint")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    hint: bytes
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., hint: _Optional[bytes] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("seq", "have_len", "traceparent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    HAVE_LEN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    have_len: int
    traceparent: str
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., have_len: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("seq", "reason", "traceparent", "retryable")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    reason: str
    traceparent: str
    retryable: bool
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., reason: _Optional[str] = ..., traceparent: _Optional[str] = ..., retryable: bool = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("hint", "gap", "refused")
    HINT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    hint: HintEnvelope
    gap: Gap
    refused: Refused
    def __init__(self, hint: _Optional[_Union[HintEnvelope, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...
