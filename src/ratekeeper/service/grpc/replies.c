/* From replies to frames: response headers, messages, and trailers with the status. */
#include "streams.h"

#include <stdlib.h>
#include <string.h>

enum {
    STATUS_TEXT_BYTES_MAX = 1024,
    BYTES_PER_POINT_BACK = 1024,
};

static const char *const STATUSES[H2_STATUS_MAX + 1] = {
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15", "16"};

enum { CONSTANT = NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE };

static nghttp2_nv field(const char *name, const char *value)
{
    return (nghttp2_nv){(uint8_t *)name, (uint8_t *)value, strlen(name), strlen(value), CONSTANT};
}

/* Add `grpc-status`, and `grpc-message` if there is one; return how many fields. */
static size_t status_fields(const h2_stream *stream, nghttp2_nv *fields)
{
    size_t count = 0;
    fields[count++] = field("grpc-status", STATUSES[stream->status]);
    if (stream->status_text.length > 0) {
        fields[count] = field("grpc-message", "");
        fields[count].value = stream->status_text.bytes;
        fields[count].valuelen = stream->status_text.length;
        /* Texts differ. They would drive the constant fields out of the client's table. */
        fields[count++].flags = NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_INDEX;
    }
    return count;
}

static void pay_back(h2_session *session, size_t bytes)
{
    uint32_t most = session->server->bounds.points_max - session->points;
    uint32_t points = H2_POINTS_PER_ANSWER + (uint32_t)(bytes / BYTES_PER_POINT_BACK);
    session->points += points < most ? points : most;
}

/* The status is percent-encoded as gRPC demands it. */
static bool set_status(h2_stream *stream, unsigned status, const uint8_t *text, size_t length)
{
    static const char HEX[] = "0123456789ABCDEF";
    stream->status = status <= H2_STATUS_MAX ? status : 2; /* UNKNOWN */
    for (size_t i = 0; i < length && stream->status_text.length < STATUS_TEXT_BYTES_MAX; i++) {
        uint8_t c = text[i];
        bool is_plain = c >= ' ' && c <= '~' && c != '%';
        uint8_t encoded[3] = {'%', (uint8_t)HEX[c >> 4], (uint8_t)HEX[c & 15]};
        if (!h2_append(&stream->status_text, is_plain ? &c : encoded, is_plain ? 1 : 3))
            return false;
    }
    stream->state = ANSWERED;
    return true;
}

static ssize_t read_output(nghttp2_session *http2, int32_t id, uint8_t *to, size_t length,
                           uint32_t *flags, nghttp2_data_source *source, void *context)
{
    h2_session *session = context;
    h2_stream *stream = source->ptr;
    size_t left = stream->output.length - stream->output_at;
    size_t taken = left < length ? left : length;
    if (taken > 0)
        memcpy(to, stream->output.bytes + stream->output_at, taken);
    stream->output_at += taken;
    stream->output_since = session->ticks;
    if (stream->output_at < stream->output.length)
        return (ssize_t)taken;
    stream->output.length = stream->output_at = 0;
    if (stream->state == ANSWERED) {
        nghttp2_nv fields[2];
        size_t count = status_fields(stream, fields);
        *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
        if (nghttp2_submit_trailer(http2, id, fields, count) != 0)
            return NGHTTP2_ERR_CALLBACK_FAILURE;
    } else if (taken == 0) {
        return NGHTTP2_ERR_DEFERRED;
    }
    return (ssize_t)taken;
}

/* Submit the response headers, or wake the stream up if they are submitted already. */
static bool submit_output(h2_session *session, h2_stream *stream)
{
    if (stream->is_responded) {
        int error = nghttp2_session_resume_data(session->http2, stream->id);
        return error == 0 || error == NGHTTP2_ERR_INVALID_ARGUMENT; /* it is not deferred */
    }
    const nghttp2_nv fields[] = {field(":status", "200"),
                                 field("content-type", "application/grpc")};
    const nghttp2_data_provider provider = {{.ptr = stream}, read_output};
    stream->is_responded = true;
    stream->output_since = session->ticks;
    return nghttp2_submit_response(session->http2, stream->id, fields, 2, &provider) == 0;
}

/* A response without messages: the status is in the response headers. */
static bool submit_trailers_only(h2_session *session, h2_stream *stream, const char *http_status)
{
    nghttp2_nv fields[5] = {field(":status", http_status),
                            field("content-type", "application/grpc")};
    size_t count = 2;
    if (stream->status == 12) /* UNIMPLEMENTED: the reason may be a compressed message */
        fields[count++] = field("grpc-accept-encoding", "identity");
    count += status_fields(stream, fields + count);
    stream->is_responded = true;
    stream->output_since = session->ticks;
    return nghttp2_submit_response(session->http2, stream->id, fields, count, NULL) == 0;
}

/* Drop the bytes that were sent: a client that always leaves one byte unread must not make the
 * buffer grow. */
static void drop_sent(h2_stream *stream)
{
    size_t left = stream->output.length - stream->output_at;
    if (stream->output_at == 0 || stream->output_at < left)
        return; /* it would take longer than it took to send */
    memmove(stream->output.bytes, stream->output.bytes + stream->output_at, left);
    stream->output.length = left;
    stream->output_at = 0;
}

static bool add_message(h2_session *session, h2_stream *stream, const uint8_t *message,
                        size_t length)
{
    const uint8_t prefix[H2_PREFIX_BYTES] = {0, (uint8_t)(length >> 24), (uint8_t)(length >> 16),
                                             (uint8_t)(length >> 8), (uint8_t)length};
    if (stream->output_at == stream->output.length)
        stream->output_since = session->ticks;
    pay_back(session, length);
    drop_sent(stream);
    return h2_reserve(&stream->output, stream->output.length + sizeof prefix + length) &&
           h2_append(&stream->output, prefix, sizeof prefix) &&
           h2_append(&stream->output, message, length);
}

static h2_stream *given_stream(h2_session *session, int32_t id)
{
    if (session->is_out_of_memory)
        return NULL;
    h2_stream *stream = h2_find_stream(session, id);
    return stream != NULL && stream->state == GIVEN ? stream : NULL;
}

static bool checked(h2_session *session, bool is_done)
{
    if (!is_done)
        session->is_out_of_memory = true;
    return is_done;
}

bool h2_reply(h2_session *session, int32_t id, const uint8_t *message, size_t length)
{
    h2_stream *stream = given_stream(session, id);
    return stream == NULL ||
           checked(session, add_message(session, stream, message, length) &&
                                set_status(stream, 0, NULL, 0) && submit_output(session, stream));
}

bool h2_send(h2_session *session, int32_t id, const uint8_t *message, size_t length)
{
    h2_stream *stream = given_stream(session, id);
    return stream == NULL || checked(session, add_message(session, stream, message, length) &&
                                                  submit_output(session, stream));
}

bool h2_end(h2_session *session, int32_t id, unsigned status, const uint8_t *text, size_t length)
{
    h2_stream *stream = given_stream(session, id);
    if (stream == NULL)
        return true;
    pay_back(session, 0);
    return checked(session,
                   set_status(stream, status, text, length) &&
                       (stream->is_responded ? submit_output(session, stream)
                                             : submit_trailers_only(session, stream, "200")));
}

bool h2_refuse(h2_session *session, h2_stream *stream, const char *http_status, unsigned status,
               const char *text)
{
    bool was_given = stream->state == GIVEN;
    session->server->refused[status]++;
    h2_give_to_pool(session, stream, stream->pooled);
    h2_drop(&stream->message);
    bool is_done = set_status(stream, status, (const uint8_t *)text, strlen(text)) &&
                   (stream->is_responded ? submit_output(session, stream)
                                         : submit_trailers_only(session, stream, http_status)) &&
                   (!was_given || h2_add_event(session, H2_CLOSED, stream->id) != NULL);
    return checked(session, is_done);
}

size_t h2_unsent(h2_session *session, int32_t id)
{
    const h2_stream *stream = h2_find_stream(session, id);
    return stream == NULL ? 0 : stream->output.length - stream->output_at;
}

static void count_reset(h2_server *server, uint32_t code)
{
    if (code == NGHTTP2_REFUSED_STREAM)
        server->resets.streams++;
    else if (code == NGHTTP2_CANCEL)
        server->resets.slow++;
    else if (code != NGHTTP2_NO_ERROR)
        server->resets.malformed++;
}

static void count_goaway(h2_server *server, uint32_t code)
{
    if (code == NGHTTP2_ENHANCE_YOUR_CALM)
        server->resets.floods++;
    else if (code != NGHTTP2_NO_ERROR)
        server->resets.violations++;
}

int h2_on_frame_sent(nghttp2_session *http2, const nghttp2_frame *frame, void *context)
{
    const h2_session *session = context;
    if (frame->hd.type == NGHTTP2_RST_STREAM)
        count_reset(session->server, frame->rst_stream.error_code);
    else if (frame->hd.type == NGHTTP2_GOAWAY)
        count_goaway(session->server, frame->goaway.error_code);
    /* The reply is complete and the client still sends: it can stop (RFC 9113, 8.1). */
    if (frame->hd.type == NGHTTP2_HEADERS && frame->hd.flags & NGHTTP2_FLAG_END_STREAM &&
        nghttp2_session_get_stream_remote_close(http2, frame->hd.stream_id) == 0)
        nghttp2_submit_rst_stream(http2, NGHTTP2_FLAG_NONE, frame->hd.stream_id, NGHTTP2_NO_ERROR);
    return 0;
}
