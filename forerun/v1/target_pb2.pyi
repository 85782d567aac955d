from forerun.v1 import common_pb2 as _common_pb2
from forerun.v1 import draft_pb2 as _draft_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_END_TOKEN: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
FINISH_UNSPECIFIED: Finish
FINISH_END_TOKEN: Finish
FINISH_LENGTH: Finish

class TargetParams(_message.Message):
    __slots__ = ("sampling", "max_tokens", "min_tokens", "end_token_ids", "sources", "max_draft_tokens", "trace_detail", "logits_digest")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACE_DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    sampling: _common_pb2.Sampling
    max_tokens: int
    min_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[_common_pb2.Source]
    max_draft_tokens: int
    trace_detail: bool
    logits_digest: bool
    def __init__(self, sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.Source, str]]] = ..., max_draft_tokens: _Optional[int] = ..., trace_detail: bool = ..., logits_digest: bool = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("seq", "prompt_len", "tokens", "params", "traceparent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    prompt_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    params: TargetParams
    traceparent: str
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., prompt_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., params: _Optional[_Union[TargetParams, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("seq", "traceparent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    traceparent: str
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class TargetCommand(_message.Message):
    __slots__ = ("start", "hint", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: Start
    hint: _draft_pb2.HintEnvelope
    stop: Stop
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., hint: _Optional[_Union[_draft_pb2.HintEnvelope, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("started_ns", "ended_ns", "passes", "drafted", "windows")
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    started_ns: int
    ended_ns: int
    passes: int
    drafted: int
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, started_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ..., passes: _Optional[int] = ..., drafted: _Optional[int] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class Emit(_message.Message):
    __slots__ = ("seq", "base_len", "tokens", "accepted", "want", "timings", "finish", "cached", "traceparent", "digests", "preempted", "branched", "hits")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    BRANCHED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    seq: _common_pb2.Seq
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    want: int
    timings: Timings
    finish: Finish
    cached: int
    traceparent: str
    digests: _containers.RepeatedScalarFieldContainer[int]
    preempted: int
    branched: int
    hits: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[_Union[_common_pb2.Seq, _Mapping]] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., want: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., finish: _Optional[_Union[Finish, str]] = ..., cached: _Optional[int] = ..., traceparent: _Optional[str] = ..., digests: _Optional[_Iterable[int]] = ..., preempted: _Optional[int] = ..., branched: _Optional[int] = ..., hits: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("emit", "gap", "refused")
    EMIT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    emit: Emit
    gap: _draft_pb2.Gap
    refused: _draft_pb2.Refused
    def __init__(self, emit: _Optional[_Union[Emit, _Mapping]] = ..., gap: _Optional[_Union[_draft_pb2.Gap, _Mapping]] = ..., refused: _Optional[_Union[_draft_pb2.Refused, _Mapping]] = ...) -> None: ...
