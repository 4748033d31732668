/* One HTTP/2 connection of a gRPC server on libnghttp2: bytes in, events out; replies in, bytes
 * out. Plain C without Python, I/O, threads or a clock: the caller calls `h2_tick` once a second.
 *
 * The session itself answers requests that are not gRPC, messages that are compressed, too large or
 * malformed, and metadata that is too large. Events are calls that a method has to answer.
 *
 * Bounds. A frame costs its connection points, and an answered call gives some back. A connection
 * without points ends with GOAWAY (ENHANCE_YOUR_CALM): that bounds floods of every kind of frame,
 * and rapid resets. Unfinished messages of all connections share one pool of bytes. */
#ifndef RK_HTTP2_SESSION_H
#define RK_HTTP2_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <nghttp2/nghttp2.h>

enum { H2_STATUS_MAX = 16 }; /* the highest status code of gRPC */

typedef struct {
    uint8_t *bytes;
    size_t length, room;
} h2_buffer;

typedef struct {
    uint32_t streams_max;              /* per connection, at the same time */
    uint32_t message_bytes_max;        /* of a unary method */
    uint32_t stream_message_bytes_max; /* of a streaming method */
    uint32_t metadata_bytes_max;       /* names, values, and 32 for each field */
    uint32_t points_max, points_per_tick;
    uint32_t request_ticks;   /* in which a request has to arrive */
    uint32_t unread_ticks;    /* in which the client has to accept more of a reply */
    uint32_t keepalive_ticks; /* without a byte, after which the server sends a PING */
    uint32_t ping_ticks;      /* in which the client has to send something after that */
    size_t pool_bytes_max;    /* unfinished and queued messages of all connections */
} h2_bounds;

/* The state that all connections of a server share. */
typedef struct {
    h2_bounds bounds;
    h2_buffer *streaming; /* the paths of the streaming methods */
    size_t streaming_count;
    size_t pool_bytes;
    uint64_t refused[H2_STATUS_MAX + 1]; /* calls that sessions answered themselves, by status */
    struct {
        uint64_t streams;    /* over the bound of a connection */
        uint64_t slow;       /* calls whose client was too slow to send or to read */
        uint64_t malformed;  /* requests that are not HTTP */
        uint64_t floods;     /* connections with too many frames, or with endless headers */
        uint64_t violations; /* connections that break the protocol otherwise */
    } resets;                /* without a status */
    nghttp2_session_callbacks *callbacks;
    nghttp2_option *option;
} h2_server;

typedef enum {
    H2_NOTHING,
    H2_CALL,        /* a whole unary call: headers, timeout_ns, message */
    H2_OPENED,      /* a streaming call: headers, timeout_ns */
    H2_MESSAGE,     /* of a streaming call; h2_taken says when it has left the queue */
    H2_HALF_CLOSED, /* the client sends no more messages */
    H2_CLOSED,      /* the client reset the stream: cancel the call */
} h2_kind;

typedef struct {
    h2_kind kind;
    int32_t stream;
    int64_t timeout_ns; /* -1: the client sent none */
    size_t path_length;
    h2_buffer headers; /* the path, then name NUL value NUL for each field */
    h2_buffer message;
} h2_event;

typedef struct h2_session h2_session;

/* Return false if memory is exhausted. The server must outlive its sessions. */
bool h2_server_open(h2_server *server, const h2_bounds *bounds);
bool h2_server_add_streaming(h2_server *server, const char *path, size_t length);
void h2_server_close(h2_server *server);

h2_session *h2_open(h2_server *server);
void h2_close(h2_session *session);

/* Both return false if the connection has to end: h2_why says why. h2_to_send has the GOAWAY. */
bool h2_receive(h2_session *session, const uint8_t *data, size_t length);
bool h2_tick(h2_session *session);
const char *h2_why(const h2_session *session);

/* Take the events since the last call. The caller frees each with h2_event_free, then the array
 * with free. */
h2_event *h2_take_events(h2_session *session, size_t *count);
void h2_event_free(h2_event *event);

/* A stream that is closed or has its reply already is ignored by all of these; the client may
 * have reset it. They return false only if memory is exhausted. */
bool h2_reply(h2_session *session, int32_t stream, const uint8_t *message, size_t length);
bool h2_send(h2_session *session, int32_t stream, const uint8_t *message, size_t length);
bool h2_end(h2_session *session, int32_t stream, unsigned status, const uint8_t *text,
            size_t length);
bool h2_taken(h2_session *session, int32_t stream, size_t length);
size_t h2_unsent(h2_session *session, int32_t stream);

/* Return the bytes to send: about `at_most`, and 0 if there are none. They are valid until the
 * next call on the session. Returns -1 if memory is exhausted. */
ptrdiff_t h2_to_send(h2_session *session, size_t at_most, const uint8_t **bytes);

/* Shutdown: first the notice, which new calls may still cross; then the last GOAWAY. */
bool h2_notice(h2_session *session);
bool h2_goaway(h2_session *session);

size_t h2_streams(const h2_session *session);
bool h2_finished(const h2_session *session); /* nothing to send, nothing to wait for */

/* Return the value of a field in `headers` after the path; NULL if there is none. */
const char *h2_find(const uint8_t *fields, size_t length, const char *name, size_t name_length,
                    size_t *value_length);

#endif
