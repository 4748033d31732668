/* From frames to events: headers, messages, and the ends of streams. These are the callbacks of
 * nghttp2. They return an error only if memory is exhausted. */
#include "streams.h"

#include <stdlib.h>
#include <string.h>

/* The status codes of gRPC. */
enum { RESOURCE_EXHAUSTED = 8, UNIMPLEMENTED = 12, INTERNAL = 13 };

enum { FIELD_OVERHEAD = 32 }; /* RFC 9113, 6.5.2 */

/* ---- Headers ---- */

static int result(const h2_session *session)
{
    return session->is_out_of_memory ? NGHTTP2_ERR_CALLBACK_FAILURE : 0;
}

static bool equals(const uint8_t *bytes, size_t length, const char *text)
{
    return length == strlen(text) && memcmp(bytes, text, length) == 0;
}

int h2_on_begin_headers(nghttp2_session *http2, const nghttp2_frame *frame, void *context)
{
    h2_session *session = context;
    if (frame->hd.type != NGHTTP2_HEADERS || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
        return 0; /* trailers */
    h2_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) {
        h2_no_memory(session);
        return result(session);
    }
    stream->id = frame->hd.stream_id;
    if (nghttp2_session_set_stream_user_data(http2, stream->id, stream) != 0) {
        free(stream);
        return 0;
    }
    stream->since = stream->output_since = session->ticks;
    stream->timeout_ns = -1;
    stream->is_identity = true;
    stream->next = session->streams;
    stream->link = &session->streams;
    if (stream->next != NULL)
        stream->next->link = &stream->next;
    session->streams = stream;
    session->streams_count++;
    return 0;
}

/* `grpc-timeout`: up to eight digits and a unit. */
static bool parse_timeout(const uint8_t *text, size_t length, int64_t *timeout_ns)
{
    static const struct {
        char unit;
        int64_t ns;
    } UNITS[] = {{'n', 1},          {'u', 1000},        {'m', 1000000},
                 {'S', 1000000000}, {'M', 60000000000}, {'H', 3600000000000}};
    int64_t number = 0;
    if (length < 2 || length > 9)
        return false;
    for (size_t i = 0; i < length - 1; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        number = number * 10 + (text[i] - '0');
    }
    for (size_t i = 0; i < sizeof UNITS / sizeof *UNITS; i++)
        if (text[length - 1] == (uint8_t)UNITS[i].unit) {
            *timeout_ns = number > INT64_MAX / UNITS[i].ns ? INT64_MAX : number * UNITS[i].ns;
            return true;
        }
    return false;
}

/* `application/grpc`, `application/grpc+proto`, `application/grpc;…`, but not grpc-web. */
static bool is_grpc(const uint8_t *value, size_t length)
{
    static const char TYPE[] = "application/grpc";
    size_t type_length = sizeof TYPE - 1;
    return length >= type_length && memcmp(value, TYPE, type_length) == 0 &&
           (length == type_length || value[type_length] == '+' || value[type_length] == ';');
}

static void read_pseudo_field(h2_stream *stream, const uint8_t *name, size_t name_length,
                              const uint8_t *value, size_t length, bool *has_memory)
{
    if (equals(name, name_length, ":method")) {
        stream->is_post = equals(value, length, "POST");
    } else if (equals(name, name_length, ":path")) {
        *has_memory = h2_append(&stream->headers, value, length);
        stream->path_length = length;
    }
}

/* Read a field of the protocol itself; return false for metadata. */
static bool read_own_field(h2_stream *stream, const uint8_t *name, size_t name_length,
                           const uint8_t *value, size_t length)
{
    if (equals(name, name_length, "content-type")) {
        stream->is_grpc = is_grpc(value, length);
    } else if (equals(name, name_length, "grpc-timeout")) {
        stream->is_bad_timeout = !parse_timeout(value, length, &stream->timeout_ns);
    } else if (equals(name, name_length, "grpc-encoding")) {
        stream->is_identity = equals(value, length, "identity");
    } else {
        return equals(name, name_length, "te") || equals(name, name_length, "grpc-accept-encoding");
    }
    return true;
}

int h2_on_header(nghttp2_session *http2, const nghttp2_frame *frame, const uint8_t *name,
                 size_t name_length, const uint8_t *value, size_t value_length, uint8_t flags,
                 void *context)
{
    (void)http2, (void)flags;
    h2_session *session = context;
    h2_stream *stream = h2_find_stream(session, frame->hd.stream_id);
    if (stream == NULL)
        return 0;
    stream->fields_bytes += name_length + value_length + FIELD_OVERHEAD;
    size_t most = session->server->bounds.metadata_bytes_max;
    if (stream->fields_bytes > most) {
        /* The client gets a status, unless it is far too large: a small header block can refer to
         * the same large field again and again, and checking all of them takes long. */
        stream->is_oversized = true;
        return stream->fields_bytes > 4 * most ? NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE : 0;
    }
    if (stream->state != READING_HEADERS)
        return 0; /* trailers */
    bool has_memory = true;
    if (name[0] == ':')
        read_pseudo_field(stream, name, name_length, value, value_length, &has_memory);
    else if (!read_own_field(stream, name, name_length, value, value_length))
        /* nghttp2 ends names and values with NUL and accepts none inside. */
        has_memory = h2_append(&stream->headers, name, name_length + 1) &&
                     h2_append(&stream->headers, value, value_length + 1);
    if (!has_memory)
        h2_no_memory(session);
    return result(session);
}

const char *h2_find(const uint8_t *fields, size_t length, const char *name, size_t name_length,
                    size_t *value_length)
{
    for (size_t at = 0; at < length;) {
        const char *field = (const char *)fields + at;
        size_t field_length = strnlen(field, length - at);
        if (field_length >= length - at)
            return NULL;
        const char *value = field + field_length + 1;
        *value_length = strnlen(value, length - at - field_length - 1);
        if (field_length == name_length && memcmp(field, name, name_length) == 0)
            return value;
        at += field_length + 1 + *value_length + 1;
    }
    return NULL;
}

static bool has_streaming(const h2_server *server, const uint8_t *path, size_t length)
{
    for (size_t i = 0; i < server->streaming_count; i++)
        if (server->streaming[i].length == length &&
            memcmp(server->streaming[i].bytes, path, length) == 0)
            return true;
    return false;
}

static void give_call(h2_session *session, h2_stream *stream, h2_kind kind)
{
    h2_event *event = h2_add_event(session, kind, stream->id);
    if (event == NULL)
        return;
    event->timeout_ns = stream->timeout_ns;
    event->path_length = stream->path_length;
    event->headers = stream->headers;
    event->message = stream->message;
    stream->headers = stream->message = (h2_buffer){.bytes = NULL};
    h2_give_to_pool(session, stream, stream->pooled);
    stream->state = GIVEN;
    stream->event_at = session->events_count - 1;
    stream->event_number = session->takes;
}

static void end_headers(h2_session *session, h2_stream *stream)
{
    stream->state = READING;
    if (stream->is_oversized)
        h2_refuse(session, stream, "200", RESOURCE_EXHAUSTED, "the metadata is too large");
    else if (!stream->is_grpc)
        h2_refuse(session, stream, "415", INTERNAL, "the content-type is not application/grpc");
    else if (!stream->is_post)
        h2_refuse(session, stream, "405", INTERNAL, "the method is not POST");
    else if (stream->is_bad_timeout)
        h2_refuse(session, stream, "200", INTERNAL, "grpc-timeout is malformed");
    else if (has_streaming(session->server, stream->headers.bytes, stream->path_length)) {
        stream->is_streaming = true;
        give_call(session, stream, H2_OPENED);
    }
}

/* ---- Messages ---- */

static bool begin_message(h2_session *session, h2_stream *stream)
{
    const h2_bounds *bounds = &session->server->bounds;
    const uint8_t *prefix = stream->prefix;
    size_t most =
        stream->is_streaming ? bounds->stream_message_bytes_max : bounds->message_bytes_max;
    stream->message_length =
        (size_t)prefix[1] << 24 | (size_t)prefix[2] << 16 | (size_t)prefix[3] << 8 | prefix[4];
    if (prefix[0] > 1)
        h2_refuse(session, stream, "200", INTERNAL, "the flags of a message are unknown");
    else if (prefix[0] == 1 && stream->is_identity)
        h2_refuse(session, stream, "200", INTERNAL, "a compressed message without grpc-encoding");
    else if (prefix[0] == 1)
        h2_refuse(session, stream, "200", UNIMPLEMENTED, "the grpc-encoding is not supported");
    else if (stream->message_length > most)
        h2_refuse(session, stream, "200", RESOURCE_EXHAUSTED, "the message is too large");
    else if (!stream->is_streaming && stream->messages > 0)
        h2_refuse(session, stream, "200", UNIMPLEMENTED, "the method takes one message");
    else
        return true;
    return false;
}

/* Grow with the bytes that arrive, and not with the length that the client announces. */
static bool make_room(h2_session *session, h2_stream *stream, size_t more)
{
    h2_buffer *message = &stream->message;
    size_t needed = message->length + more, room = 2 * message->room;
    if (needed <= message->room)
        return true;
    if (room < needed)
        room = needed;
    if (room > stream->message_length)
        room = stream->message_length;
    if (room > H2_SMALL_BYTES && !h2_take_from_pool(session, stream, room - message->room)) {
        h2_refuse(session, stream, "200", RESOURCE_EXHAUSTED, "too many messages are arriving");
        return false;
    }
    if (!h2_reserve(message, room))
        h2_no_memory(session);
    return !session->is_out_of_memory;
}

static void end_message(h2_session *session, h2_stream *stream)
{
    stream->messages++;
    stream->prefix_length = 0;
    if (!stream->is_streaming)
        return; /* it waits for the end of the request */
    h2_event *event = h2_add_event(session, H2_MESSAGE, stream->id);
    if (event == NULL)
        return;
    event->message = stream->message;
    stream->message = (h2_buffer){.bytes = NULL};
    stream->queued += event->message.length + H2_QUEUED_OVERHEAD;
    /* A method may not take them for long: many small messages are one large one. */
    size_t pooled = stream->pooled + H2_SMALL_BYTES;
    if (stream->queued > pooled && !h2_take_from_pool(session, stream, stream->queued - pooled))
        h2_refuse(session, stream, "200", RESOURCE_EXHAUSTED, "too many messages are queued");
}

/* Add bytes to the message that is arriving; return how many were used, 0 if it was refused. */
static size_t add_to_message(h2_session *session, h2_stream *stream, const uint8_t *data,
                             size_t length)
{
    size_t wanted, taken;
    if (stream->prefix_length < H2_PREFIX_BYTES) {
        if (stream->prefix_length == 0 && stream->is_streaming)
            stream->since = session->ticks;
        wanted = H2_PREFIX_BYTES - stream->prefix_length;
        taken = wanted < length ? wanted : length;
        memcpy(stream->prefix + stream->prefix_length, data, taken);
        stream->prefix_length += taken;
        if (stream->prefix_length < H2_PREFIX_BYTES)
            return taken;
        if (!begin_message(session, stream))
            return 0;
    } else {
        wanted = stream->message_length - stream->message.length;
        taken = wanted < length ? wanted : length;
        if (!make_room(session, stream, taken))
            return 0;
        memcpy(stream->message.bytes + stream->message.length, data, taken);
        stream->message.length += taken;
    }
    if (stream->message.length == stream->message_length)
        end_message(session, stream);
    return taken;
}

static bool takes_messages(const h2_stream *stream)
{
    return stream->state == READING || (stream->state == GIVEN && stream->is_streaming);
}

int h2_on_data(nghttp2_session *http2, uint8_t flags, int32_t id, const uint8_t *data,
               size_t length, void *context)
{
    (void)flags;
    h2_session *session = context;
    h2_stream *stream = h2_find_stream(session, id);
    size_t left = length;
    while (left > 0 && stream != NULL && takes_messages(stream)) {
        size_t taken = add_to_message(session, stream, data, left);
        if (taken == 0)
            break;
        data += taken;
        left -= taken;
    }
    /* Arriving bytes are bounded by the pool, and not by the window of the connection: one stream
     * whose method is slow must not stop the others. */
    nghttp2_session_consume_connection(http2, length);
    if (stream != NULL && stream->queued > H2_QUEUE_BYTES_MAX)
        stream->owed += length;
    else
        nghttp2_session_consume_stream(http2, id, length);
    return result(session);
}

bool h2_taken(h2_session *session, int32_t id, size_t length)
{
    h2_stream *stream = h2_find_stream(session, id);
    if (stream == NULL)
        return true;
    length += H2_QUEUED_OVERHEAD;
    stream->queued -= length < stream->queued ? length : stream->queued;
    if (stream->queued <= H2_QUEUE_BYTES_MAX && stream->owed > 0) {
        nghttp2_session_consume_stream(session->http2, id, stream->owed);
        stream->owed = 0;
        stream->since = session->ticks;
    }
    size_t kept = stream->queued + stream->message.room;
    if (stream->pooled > kept)
        h2_give_to_pool(session, stream, stream->pooled - kept);
    return true;
}

/* ---- Ends ---- */

static void half_close(h2_session *session, h2_stream *stream)
{
    stream->half_closed = true;
    if (!takes_messages(stream))
        return;
    if (stream->prefix_length > 0)
        h2_refuse(session, stream, "200", INTERNAL, "the request ends inside a message");
    else if (stream->is_streaming)
        h2_add_event(session, H2_HALF_CLOSED, stream->id);
    else if (stream->messages == 0)
        h2_refuse(session, stream, "200", UNIMPLEMENTED, "the method takes one message");
    else
        give_call(session, stream, H2_CALL);
}

int h2_on_frame(nghttp2_session *http2, const nghttp2_frame *frame, void *context)
{
    (void)http2;
    h2_session *session = context;
    uint8_t type = frame->hd.type, flags = frame->hd.flags;
    if (type == NGHTTP2_SETTINGS)
        session->is_greeted = true;
    if (type == NGHTTP2_PING && flags & NGHTTP2_FLAG_ACK && session->is_noticed &&
        memcmp(frame->ping.opaque_data, "shutdown", 8) == 0)
        h2_goaway(session);
    if (type != NGHTTP2_HEADERS && type != NGHTTP2_DATA)
        return 0;
    h2_stream *stream = h2_find_stream(session, frame->hd.stream_id);
    if (stream == NULL)
        return 0;
    if (stream->state == READING_HEADERS)
        end_headers(session, stream);
    if (flags & NGHTTP2_FLAG_END_STREAM && !stream->half_closed)
        half_close(session, stream);
    return result(session);
}

/* A call whose event was not taken yet is dropped with its stream: a reset costs no method. */
static bool drop_call(h2_session *session, const h2_stream *stream)
{
    if (stream->is_streaming || stream->event_number != session->takes)
        return false;
    h2_event *event = &session->events[stream->event_at];
    h2_event_free(event);
    event->kind = H2_NOTHING;
    return true;
}

void h2_close_stream(h2_session *session, h2_stream *stream)
{
    *stream->link = stream->next;
    if (stream->next != NULL)
        stream->next->link = stream->link;
    session->streams_count--;
    if (stream->state == GIVEN && !drop_call(session, stream))
        h2_add_event(session, H2_CLOSED, stream->id);
    h2_give_to_pool(session, stream, stream->pooled);
    h2_drop(&stream->headers);
    h2_drop(&stream->message);
    h2_drop(&stream->output);
    h2_drop(&stream->status_text);
    free(stream);
}

int h2_on_stream_close(nghttp2_session *http2, int32_t id, uint32_t code, void *context)
{
    (void)code;
    h2_session *session = context;
    h2_stream *stream = h2_find_stream(session, id);
    if (stream != NULL) {
        nghttp2_session_set_stream_user_data(http2, id, NULL);
        h2_close_stream(session, stream);
    }
    return result(session);
}
