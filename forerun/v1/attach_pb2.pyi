from forerun.v1 import common_pb2 as _common_pb2
from forerun.v1 import draft_pb2 as _draft_pb2
from forerun.v1 import target_pb2 as _target_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_TARGET: _ClassVar[Role]
    ROLE_DRAFT: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_TARGET: Role
ROLE_DRAFT: Role

class Hello(_message.Message):
    __slots__ = ("role", "worker", "incarnation", "model", "revision", "numerics_id", "capacity", "context_limit", "vocab_size", "sources", "lookahead", "eos_token_ids", "kv_tokens")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    role: Role
    worker: str
    incarnation: str
    model: str
    revision: str
    numerics_id: str
    capacity: int
    context_limit: int
    vocab_size: int
    sources: _containers.RepeatedScalarFieldContainer[_common_pb2.Source]
    lookahead: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_tokens: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., numerics_id: _Optional[str] = ..., capacity: _Optional[int] = ..., context_limit: _Optional[int] = ..., vocab_size: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.Source, str]]] = ..., lookahead: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., kv_tokens: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("progress", "sequences", "idle", "draining")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    progress: int
    sequences: int
    idle: bool
    draining: bool
    def __init__(self, progress: _Optional[int] = ..., sequences: _Optional[int] = ..., idle: bool = ..., draining: bool = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("hello", "heartbeat", "draft", "target")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    draft: _containers.RepeatedCompositeFieldContainer[_draft_pb2.DraftEvent]
    target: _containers.RepeatedCompositeFieldContainer[_target_pb2.TargetEvent]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., draft: _Optional[_Iterable[_Union[_draft_pb2.DraftEvent, _Mapping]]] = ..., target: _Optional[_Iterable[_Union[_target_pb2.TargetEvent, _Mapping]]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("coordinator", "heartbeat_ms")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    coordinator: str
    heartbeat_ms: int
    def __init__(self, coordinator: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ...) -> None: ...

class CoordinatorFrame(_message.Message):
    __slots__ = ("welcome", "draft", "target")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    draft: _containers.RepeatedCompositeFieldContainer[_draft_pb2.DraftCommand]
    target: _containers.RepeatedCompositeFieldContainer[_target_pb2.TargetCommand]
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., draft: _Optional[_Iterable[_Union[_draft_pb2.DraftCommand, _Mapping]]] = ..., target: _Optional[_Iterable[_Union[_target_pb2.TargetCommand, _Mapping]]] = ...) -> None: ...
