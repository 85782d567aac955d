"""Channel options of every channel and server of the project, derived from two numbers.

Both sides of a connection come from the same KEEPALIVE_S, so a client can never ping more often than
its server permits ("too many pings"), and from the same MAX_MESSAGE_BYTES, so no hop has a smaller
limit than the entry. The entry itself refuses a request above MAX_MESSAGE_BYTES with INVALID_ARGUMENT;
the transport takes TRANSPORT_BYTES, so that such a request gets that far.
"""

from __future__ import annotations

KEEPALIVE_S = 20.0
"""A connection quiet for this long is pinged, by both sides, whether or not a call is open."""

GONE_FACTOR = 1.5
"""A peer that vanished without closing is noticed within KEEPALIVE_S * GONE_FACTOR."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The largest request the public API takes; reported by GetModelInfo."""

TRANSPORT_BYTES = 2 * MAX_MESSAGE_BYTES

RECONNECT_FIRST_MS = 200
RECONNECT_MOST_MS = 2_000
"""A worker finds its coordinator again within seconds; gRPC's own limit is two minutes."""

Options = list[tuple[str, int]]


def client_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    """For grpc.aio.insecure_channel and secure_channel. `keepalive_s` is for tests: give the server the same."""
    return [
        *_shared(keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
        ("grpc.enable_http_proxy", 0),  # services talk to each other, not through a web proxy
    ]


def server_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    """For grpc.aio.server. Also takes clients of other makes that ping up to four times as often as ours."""
    return [
        *_shared(keepalive_s),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(keepalive_s / 4)),
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server beside the first
    ]


def _shared(keepalive_s: float) -> Options:
    return [
        ("grpc.keepalive_time_ms", _ms(keepalive_s)),
        ("grpc.keepalive_timeout_ms", _ms(keepalive_s * (GONE_FACTOR - 1))),  # for what TCP does not acknowledge
        ("grpc.http2.ping_timeout_ms", _ms(keepalive_s * (GONE_FACTOR - 1))),  # for a frozen peer; gRPC: a minute
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: the interval is the limit
        ("grpc.max_receive_message_length", TRANSPORT_BYTES),
        ("grpc.max_send_message_length", TRANSPORT_BYTES),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
