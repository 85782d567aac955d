from forerun.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "time_limit_ms")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    time_limit_ms: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., time_limit_ms: _Optional[int] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("mode", "sources", "max_draft_tokens", "verification")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[SpeculationParams.Mode]
        AUTO: _ClassVar[SpeculationParams.Mode]
        OFF: _ClassVar[SpeculationParams.Mode]
    MODE_UNSPECIFIED: SpeculationParams.Mode
    AUTO: SpeculationParams.Mode
    OFF: SpeculationParams.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationParams.Mode
    sources: _containers.RepeatedScalarFieldContainer[str]
    max_draft_tokens: int
    verification: _common_pb2.Verification
    def __init__(self, mode: _Optional[_Union[SpeculationParams.Mode, str]] = ..., sources: _Optional[_Iterable[str]] = ..., max_draft_tokens: _Optional[int] = ..., verification: _Optional[_Union[_common_pb2.Verification, str]] = ...) -> None: ...

class OutputParams(_message.Message):
    __slots__ = ("logprobs", "prompt_logprobs", "echo", "trace_detail", "logits_digest")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    TRACE_DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    logprobs: int
    prompt_logprobs: int
    echo: bool
    trace_detail: bool
    logits_digest: bool
    def __init__(self, logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., echo: bool = ..., trace_detail: bool = ..., logits_digest: bool = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "resume", "model", "text", "chat", "token_ids", "sampling", "stopping", "speculation", "output", "n", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    resume: Resume
    model: str
    text: str
    chat: Chat
    token_ids: TokenIds
    sampling: SamplingParams
    stopping: StoppingParams
    speculation: SpeculationParams
    output: OutputParams
    n: int
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., output: _Optional[_Union[OutputParams, _Mapping]] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class StopCause(_message.Message):
    __slots__ = ("token_id", "text", "max_tokens", "context_limit")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    max_tokens: int
    context_limit: int
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., max_tokens: _Optional[int] = ..., context_limit: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt", "cached", "completion", "drafted", "accepted", "passes", "preempted", "targets", "branched", "hits")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    BRANCHED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    cached: int
    completion: int
    drafted: int
    accepted: int
    passes: int
    preempted: int
    targets: int
    branched: int
    hits: Hits
    def __init__(self, prompt: _Optional[int] = ..., cached: _Optional[int] = ..., completion: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., passes: _Optional[int] = ..., preempted: _Optional[int] = ..., targets: _Optional[int] = ..., branched: _Optional[int] = ..., hits: _Optional[_Union[Hits, _Mapping]] = ...) -> None: ...

class Hits(_message.Message):
    __slots__ = ("continued", "branch", "awaited", "late", "miss")
    CONTINUED_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    continued: int
    branch: int
    awaited: int
    late: int
    miss: int
    def __init__(self, continued: _Optional[int] = ..., branch: _Optional[int] = ..., awaited: _Optional[int] = ..., late: _Optional[int] = ..., miss: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "attempt", "seed", "trace_id", "model", "model_revision", "numerics_id", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    seed: int
    trace_id: str
    model: str
    model_revision: str
    numerics_id: str
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., seed: _Optional[int] = ..., trace_id: _Optional[str] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., numerics_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "position", "token_ids", "text", "logits_digests", "windows")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    index: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logits_digests: _containers.RepeatedScalarFieldContainer[int]
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logits_digests: _Optional[_Iterable[int]] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("index", "finish_reason", "stop_cause", "usage", "not_exact")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_CAUSE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NOT_EXACT_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: FinishReason
    stop_cause: StopCause
    usage: Usage
    not_exact: bool
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_cause: _Optional[_Union[StopCause, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., not_exact: bool = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("started", "chunk", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "text", "token_ids", "finish_reason", "stop_cause", "seed", "usage", "not_exact", "logits_digests", "windows")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_CAUSE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NOT_EXACT_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    stop_cause: StopCause
    seed: int
    usage: Usage
    not_exact: bool
    logits_digests: _containers.RepeatedScalarFieldContainer[int]
    windows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_cause: _Optional[_Union[StopCause, _Mapping]] = ..., seed: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., not_exact: bool = ..., logits_digests: _Optional[_Iterable[int]] = ..., windows: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_revision", "numerics_id", "vocab_size", "context_limit", "lookahead", "sources", "chat_template", "eos_token_ids", "targets", "drafts", "max_message_bytes", "max_stop_strings", "version", "most_draft_tokens", "kv_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MOST_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    numerics_id: str
    vocab_size: int
    context_limit: int
    lookahead: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    targets: int
    drafts: int
    max_message_bytes: int
    max_stop_strings: int
    version: str
    most_draft_tokens: int
    kv_tokens: int
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., numerics_id: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_limit: _Optional[int] = ..., lookahead: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ..., chat_template: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., targets: _Optional[int] = ..., drafts: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_stop_strings: _Optional[int] = ..., version: _Optional[str] = ..., most_draft_tokens: _Optional[int] = ..., kv_tokens: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...
