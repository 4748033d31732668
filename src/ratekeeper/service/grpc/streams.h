/* The declarations that the files of the session share. */
#ifndef RK_HTTP2_STREAMS_H
#define RK_HTTP2_STREAMS_H

#include "session.h"

enum {
    H2_PREFIX_BYTES = 5,           /* of a gRPC message: a flag and the length */
    H2_SMALL_BYTES = 4096,         /* so much of a message is not taken from the pool */
    H2_QUEUE_BYTES_MAX = 64 << 10, /* of messages that a streaming method has not taken yet */
    H2_QUEUED_OVERHEAD = 64,       /* of one such message in Python */
    H2_POINTS_PER_ANSWER = 8,
};

typedef enum {
    READING_HEADERS,
    READING,  /* a unary request that is not complete */
    GIVEN,    /* to the caller: a whole unary call, or an open streaming call */
    ANSWERED, /* the status is known; at most output is left */
} h2_state;

typedef struct h2_stream {
    struct h2_stream *next, **link; /* all streams of the session */
    int32_t id;
    h2_state state;
    bool is_streaming, is_post, is_grpc, is_identity, is_bad_timeout, is_oversized;
    bool half_closed;  /* by the client */
    bool is_responded; /* the response headers are submitted */
    uint32_t since;    /* tick at which the request, or the message, began */
    int64_t timeout_ns;
    size_t fields_bytes, path_length;
    h2_buffer headers;

    /* The message that is arriving. */
    uint8_t prefix[H2_PREFIX_BYTES];
    size_t prefix_length, message_length;
    h2_buffer message;
    size_t messages;
    size_t pooled;                 /* bytes that this stream has taken from the pool */
    size_t queued, owed;           /* bytes not taken by the method; not granted to the client */
    size_t event_at, event_number; /* where the H2_CALL is, if its events were not taken yet */

    h2_buffer output;
    size_t output_at;
    uint32_t output_since; /* tick of the last progress */
    unsigned status;
    h2_buffer status_text;
} h2_stream;

struct h2_session {
    h2_server *server;
    nghttp2_session *http2;
    h2_stream *streams;
    size_t streams_count, pooled;
    const char *why; /* the connection has to end; NULL: it goes on */
    bool is_out_of_memory, is_greeted, is_noticed, has_goaway;
    uint32_t ticks, quiet_ticks;

    h2_event *events;
    size_t events_count, events_room, takes;

    /* The scanner of frames. */
    uint8_t head[9];
    size_t head_length, skip;
    size_t block_bytes, block_frames; /* of a header block that is not complete */
    uint32_t points;

    h2_buffer output;
};

void *h2_no_memory(h2_session *session);
bool h2_reserve(h2_buffer *buffer, size_t room);
bool h2_append(h2_buffer *buffer, const void *bytes, size_t length);
void h2_drop(h2_buffer *buffer);
h2_event *h2_add_event(h2_session *session, h2_kind kind, int32_t stream);
bool h2_take_from_pool(h2_session *session, h2_stream *stream, size_t bytes);
void h2_give_to_pool(h2_session *session, h2_stream *stream, size_t bytes);
h2_stream *h2_find_stream(h2_session *session, int32_t id);
void h2_fail(h2_session *session, uint32_t code, const char *why);

/* requests.c: callbacks of nghttp2. */
int h2_on_begin_headers(nghttp2_session *http2, const nghttp2_frame *frame, void *session);
int h2_on_header(nghttp2_session *http2, const nghttp2_frame *frame, const uint8_t *name,
                 size_t name_length, const uint8_t *value, size_t value_length, uint8_t flags,
                 void *session);
int h2_on_frame(nghttp2_session *http2, const nghttp2_frame *frame, void *session);
int h2_on_data(nghttp2_session *http2, uint8_t flags, int32_t id, const uint8_t *data,
               size_t length, void *session);
int h2_on_stream_close(nghttp2_session *http2, int32_t id, uint32_t code, void *session);
void h2_close_stream(h2_session *session, h2_stream *stream);

/* replies.c */
int h2_on_frame_sent(nghttp2_session *http2, const nghttp2_frame *frame, void *session);
/* Answer a request that no method sees. Returns false if memory is exhausted. */
bool h2_refuse(h2_session *session, h2_stream *stream, const char *http_status, unsigned status,
               const char *text);

#endif
