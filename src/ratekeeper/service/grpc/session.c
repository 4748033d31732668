/* The life of a session: opening, receiving, the points that frames cost, ticks, and sending. */
#include "streams.h"

#include <stdlib.h>
#include <string.h>

enum {
    PREFACE_BYTES = 24,
    STREAM_WINDOW_BYTES = 256 << 10,
    CONNECTION_WINDOW_BYTES = 1 << 20,
    CONTINUATIONS_MAX = 8,
    KEPT_OUTPUT_BYTES = 64 << 10,    /* by a connection, from one h2_to_send to the next */
    BLOCK_OVERHEAD = 1024,           /* of an encoded header block over its fields */
    BYTES_PER_POINT = 1024,          /* a large DATA frame costs nothing */
    BYTES_PER_EXTRA_TICK = 64 << 10, /* a large message may take longer */
};

static const uint8_t SHUTDOWN_PING[8] = "shutdown";

/* Newer versions of nghttp2, and Debian's, count resets themselves, with fewer allowed than a busy
 * Envoy sends. The symbol is weak, so that the module loads with older versions, too. */
extern void nghttp2_option_set_stream_reset_rate_limit(nghttp2_option *option, uint64_t burst,
                                                       uint64_t rate) __attribute__((weak));

/* ---- Buffers, events and the pool ---- */

void *h2_no_memory(h2_session *session)
{
    session->is_out_of_memory = true;
    return NULL;
}

bool h2_reserve(h2_buffer *buffer, size_t room)
{
    if (room <= buffer->room)
        return true;
    uint8_t *grown = realloc(buffer->bytes, room);
    if (grown == NULL)
        return false;
    buffer->bytes = grown;
    buffer->room = room;
    return true;
}

bool h2_append(h2_buffer *buffer, const void *bytes, size_t length)
{
    size_t needed = buffer->length + length;
    if (needed > buffer->room && !h2_reserve(buffer, needed < 256 ? 256 : needed * 2))
        return false;
    if (length > 0)
        memcpy(buffer->bytes + buffer->length, bytes, length);
    buffer->length = needed;
    return true;
}

void h2_drop(h2_buffer *buffer)
{
    free(buffer->bytes);
    *buffer = (h2_buffer){.bytes = NULL};
}

h2_event *h2_add_event(h2_session *session, h2_kind kind, int32_t stream)
{
    if (session->events_count == session->events_room) {
        size_t room = session->events_room ? 2 * session->events_room : 16;
        h2_event *grown = realloc(session->events, room * sizeof *grown);
        if (grown == NULL)
            return h2_no_memory(session);
        session->events = grown;
        session->events_room = room;
    }
    h2_event *event = &session->events[session->events_count++];
    *event = (h2_event){.kind = kind, .stream = stream, .timeout_ns = -1};
    return event;
}

void h2_event_free(h2_event *event)
{
    h2_drop(&event->headers);
    h2_drop(&event->message);
}

h2_event *h2_take_events(h2_session *session, size_t *count)
{
    h2_event *events = session->events;
    *count = session->events_count;
    session->events = NULL;
    session->events_count = session->events_room = 0;
    session->takes++;
    return events;
}

/* A connection has at most a quarter of the pool, so that others have room. */
bool h2_take_from_pool(h2_session *session, h2_stream *stream, size_t bytes)
{
    h2_server *server = session->server;
    if (bytes > server->bounds.pool_bytes_max - server->pool_bytes ||
        session->pooled + bytes > server->bounds.pool_bytes_max / 4)
        return false;
    server->pool_bytes += bytes;
    session->pooled += bytes;
    stream->pooled += bytes;
    return true;
}

void h2_give_to_pool(h2_session *session, h2_stream *stream, size_t bytes)
{
    if (bytes > stream->pooled)
        bytes = stream->pooled;
    stream->pooled -= bytes;
    session->pooled -= bytes;
    session->server->pool_bytes -= bytes;
}

h2_stream *h2_find_stream(h2_session *session, int32_t id)
{
    return nghttp2_session_get_stream_user_data(session->http2, id);
}

/* ---- The server ---- */

static void set_callbacks(nghttp2_session_callbacks *callbacks)
{
    nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, h2_on_begin_headers);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, h2_on_header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, h2_on_frame);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, h2_on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, h2_on_stream_close);
    nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, h2_on_frame_sent);
}

bool h2_server_open(h2_server *server, const h2_bounds *bounds)
{
    *server = (h2_server){.bounds = *bounds};
    if (nghttp2_session_callbacks_new(&server->callbacks) != 0 ||
        nghttp2_option_new(&server->option) != 0) {
        h2_server_close(server);
        return false;
    }
    set_callbacks(server->callbacks);
    nghttp2_option_set_no_auto_window_update(server->option, 1);
    nghttp2_option_set_no_closed_streams(server->option, 1);
    if (nghttp2_option_set_stream_reset_rate_limit != NULL)
        nghttp2_option_set_stream_reset_rate_limit(server->option, bounds->points_max,
                                                   bounds->points_per_tick);
    return true;
}

bool h2_server_add_streaming(h2_server *server, const char *path, size_t length)
{
    size_t count = server->streaming_count;
    h2_buffer *grown = realloc(server->streaming, (count + 1) * sizeof *grown);
    if (grown == NULL)
        return false;
    server->streaming = grown;
    grown[count] = (h2_buffer){.bytes = NULL};
    if (!h2_append(&grown[count], path, length))
        return false;
    server->streaming_count++;
    return true;
}

void h2_server_close(h2_server *server)
{
    for (size_t i = 0; i < server->streaming_count; i++)
        h2_drop(&server->streaming[i]);
    free(server->streaming);
    nghttp2_option_del(server->option);
    nghttp2_session_callbacks_del(server->callbacks);
    *server = (h2_server){.streaming = NULL};
}

/* ---- Open and close ---- */

static bool submit_settings(h2_session *session)
{
    const nghttp2_settings_entry entries[] = {
        {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, session->server->bounds.streams_max},
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES},
        {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, session->server->bounds.metadata_bytes_max},
#if NGHTTP2_VERSION_NUM >= 0x013200
        {NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1},
#endif
    };
    return nghttp2_submit_settings(session->http2, NGHTTP2_FLAG_NONE, entries,
                                   sizeof entries / sizeof *entries) == 0 &&
           nghttp2_session_set_local_window_size(session->http2, NGHTTP2_FLAG_NONE, 0,
                                                 CONNECTION_WINDOW_BYTES) == 0;
}

h2_session *h2_open(h2_server *server)
{
    h2_session *session = calloc(1, sizeof *session);
    if (session == NULL)
        return NULL;
    session->server = server;
    session->skip = PREFACE_BYTES;
    session->points = server->bounds.points_max;
    if (nghttp2_session_server_new2(&session->http2, server->callbacks, session, server->option) !=
            0 ||
        !submit_settings(session)) {
        h2_close(session);
        return NULL;
    }
    return session;
}

void h2_close(h2_session *session)
{
    while (session->streams != NULL)
        h2_close_stream(session, session->streams);
    /* libnghttp2 may free an item twice if memory was exhausted while it queued the item (1.52: in
     * nghttp2_submit_data). A leak is better. */
    if (!session->is_out_of_memory)
        nghttp2_session_del(session->http2);
    for (size_t i = 0; i < session->events_count; i++)
        h2_event_free(&session->events[i]);
    free(session->events);
    h2_drop(&session->output);
    free(session);
}

/* End the connection. Calls that were received and not answered get no reply. */
void h2_fail(h2_session *session, uint32_t code, const char *why)
{
    if (session->why == NULL) {
        session->why = why;
        nghttp2_session_terminate_session(session->http2, code);
    }
}

const char *h2_why(const h2_session *session)
{
    return session->is_out_of_memory ? "out of memory" : session->why;
}

/* ---- Frames and their cost ----
 *
 * nghttp2 has bounds of its own, which differ by version, and it does not report every frame. So
 * the session reads the frame headers itself. The answer of a call returns the points of its
 * frames. Other frames are cheap for the client to send, but not for the server to handle. */

static uint32_t cost_of_frame(uint8_t type, size_t length)
{
    switch (type) {
    case NGHTTP2_DATA:
        return length < BYTES_PER_POINT ? 1 : 0;
    case NGHTTP2_RST_STREAM:
        return 4;
    case NGHTTP2_SETTINGS:
        return 8;
    case NGHTTP2_PING:
        return 2;
    default:
        return 1;
    }
}

/* Return false if a header block has too many frames or bytes. */
static bool block_is_bounded(h2_session *session, uint8_t type, uint8_t flags, size_t length)
{
    if (type != NGHTTP2_HEADERS && type != NGHTTP2_CONTINUATION)
        return true;
    if (type == NGHTTP2_HEADERS)
        session->block_bytes = session->block_frames = 0;
    else
        session->block_frames++;
    session->block_bytes += length;
    bool is_bounded =
        session->block_frames <= CONTINUATIONS_MAX &&
        session->block_bytes <= 2 * session->server->bounds.metadata_bytes_max + BLOCK_OVERHEAD;
    if (flags & NGHTTP2_FLAG_END_HEADERS)
        session->block_bytes = session->block_frames = 0;
    return is_bounded;
}

static bool frame_is_affordable(h2_session *session)
{
    const uint8_t *head = session->head;
    size_t length = (size_t)head[0] << 16 | (size_t)head[1] << 8 | head[2];
    session->skip = length;
    session->head_length = 0;
    if (!block_is_bounded(session, head[3], head[4], length)) {
        h2_fail(session, NGHTTP2_ENHANCE_YOUR_CALM, "a header block has too many frames or bytes");
        return false;
    }
    uint32_t cost = cost_of_frame(head[3], length);
    if (cost > session->points) {
        h2_fail(session, NGHTTP2_ENHANCE_YOUR_CALM, "too many frames that belong to no call");
        return false;
    }
    session->points -= cost;
    return true;
}

static bool scan_frames(h2_session *session, const uint8_t *data, size_t length)
{
    while (length > 0) {
        bool in_head = session->skip == 0;
        size_t wanted = in_head ? sizeof session->head - session->head_length : session->skip;
        size_t taken = wanted < length ? wanted : length;
        if (in_head) {
            memcpy(session->head + session->head_length, data, taken);
            session->head_length += taken;
            if (session->head_length == sizeof session->head && !frame_is_affordable(session))
                return false;
        } else {
            session->skip -= taken;
        }
        data += taken;
        length -= taken;
    }
    return true;
}

static void fail_with(h2_session *session, ssize_t error)
{
    switch (error) {
    case NGHTTP2_ERR_BAD_CLIENT_MAGIC:
        h2_fail(session, NGHTTP2_PROTOCOL_ERROR, "the client does not speak HTTP/2");
        break;
    case NGHTTP2_ERR_NOMEM:
    case NGHTTP2_ERR_CALLBACK_FAILURE:
        h2_no_memory(session);
        break;
    default: /* NGHTTP2_ERR_FLOODED, and others of newer versions */
        h2_fail(session, NGHTTP2_ENHANCE_YOUR_CALM, "the client sends too many frames");
    }
}

bool h2_receive(h2_session *session, const uint8_t *data, size_t length)
{
    session->quiet_ticks = 0;
    if (h2_why(session) != NULL || !scan_frames(session, data, length))
        return false;
    ssize_t read = nghttp2_session_mem_recv(session->http2, data, length);
    if (read < 0)
        fail_with(session, read);
    return session->why == NULL && !session->is_out_of_memory;
}

/* ---- Time ---- */

static bool is_overdue(const h2_session *session, const h2_stream *stream)
{
    bool waits = stream->state == READING_HEADERS || stream->state == READING ||
                 (stream->state == GIVEN && stream->prefix_length > 0);
    uint32_t extra = (uint32_t)(stream->message.length / BYTES_PER_EXTRA_TICK);
    return waits && !stream->half_closed && stream->owed == 0 &&
           session->ticks - stream->since > session->server->bounds.request_ticks + extra;
}

static bool is_unread(const h2_session *session, const h2_stream *stream)
{
    return (stream->output_at < stream->output.length || stream->state == ANSWERED) &&
           session->ticks - stream->output_since > session->server->bounds.unread_ticks;
}

static void tick_stream(h2_session *session, h2_stream *stream)
{
    if (is_unread(session, stream)) {
        nghttp2_submit_rst_stream(session->http2, NGHTTP2_FLAG_NONE, stream->id, NGHTTP2_CANCEL);
    } else if (is_overdue(session, stream)) {
        if (stream->state == READING_HEADERS)
            h2_fail(session, NGHTTP2_ENHANCE_YOUR_CALM, "the headers of a request do not arrive");
        else if (stream->state == READING)
            h2_refuse(session, stream, "200", 4, "the request did not arrive in time");
        else
            nghttp2_submit_rst_stream(session->http2, NGHTTP2_FLAG_NONE, stream->id,
                                      NGHTTP2_CANCEL);
    }
}

static void tick_connection(h2_session *session)
{
    const h2_bounds *bounds = &session->server->bounds;
    if (!session->is_greeted && session->ticks > bounds->request_ticks)
        h2_fail(session, NGHTTP2_PROTOCOL_ERROR, "the client does not begin");
    session->quiet_ticks++;
    if (session->quiet_ticks == bounds->keepalive_ticks)
        nghttp2_submit_ping(session->http2, NGHTTP2_FLAG_NONE, NULL);
    if (session->quiet_ticks >= bounds->keepalive_ticks + bounds->ping_ticks)
        h2_fail(session, NGHTTP2_NO_ERROR, "the client does not answer a PING");
}

bool h2_tick(h2_session *session)
{
    if (h2_why(session) != NULL)
        return false;
    const h2_bounds *bounds = &session->server->bounds;
    session->ticks++;
    session->points = bounds->points_max - session->points < bounds->points_per_tick
                          ? bounds->points_max
                          : session->points + bounds->points_per_tick;
    tick_connection(session);
    for (h2_stream *stream = session->streams, *next; stream != NULL; stream = next) {
        next = stream->next;
        tick_stream(session, stream);
    }
    return session->why == NULL && !session->is_out_of_memory;
}

/* ---- Sending and the end ---- */

ptrdiff_t h2_to_send(h2_session *session, size_t at_most, const uint8_t **bytes)
{
    if (session->output.room > KEPT_OUTPUT_BYTES)
        h2_drop(&session->output);
    session->output.length = 0;
    while (session->output.length < at_most && !session->is_out_of_memory) {
        const uint8_t *frame;
        ssize_t length = nghttp2_session_mem_send(session->http2, &frame);
        if (length < 0 || (length > 0 && !h2_append(&session->output, frame, (size_t)length)))
            session->is_out_of_memory = true;
        if (length <= 0)
            break;
    }
    *bytes = session->output.bytes;
    return session->is_out_of_memory ? -1 : (ptrdiff_t)session->output.length;
}

bool h2_notice(h2_session *session)
{
    session->is_noticed = true;
    return nghttp2_submit_shutdown_notice(session->http2) == 0 &&
           nghttp2_submit_ping(session->http2, NGHTTP2_FLAG_NONE, SHUTDOWN_PING) == 0;
}

bool h2_goaway(h2_session *session)
{
    if (session->has_goaway)
        return true;
    session->has_goaway = true;
    return nghttp2_submit_goaway(session->http2, NGHTTP2_FLAG_NONE,
                                 nghttp2_session_get_last_proc_stream_id(session->http2),
                                 NGHTTP2_NO_ERROR, NULL, 0) == 0;
}

size_t h2_streams(const h2_session *session) { return session->streams_count; }

bool h2_finished(const h2_session *session)
{
    return !nghttp2_session_want_read(session->http2) &&
           !nghttp2_session_want_write(session->http2);
}
