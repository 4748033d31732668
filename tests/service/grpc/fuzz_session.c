/* A fuzzer of the HTTP/2 session (libFuzzer): `make fuzz`. `session_driver.c` runs random programs
 * of the same kind under gcc's sanitizers.
 *
 * The input is a program. Its first bytes choose the bounds and the allocation that fails; each
 * further group of a few bytes is one step: a frame of the client, valid or not, raw bytes, a reply
 * of a method, a second that passes, or a read. The fuzzer checks that the events of a stream come
 * in order, and that what the sessions hold is bounded and given back.
 *
 * Link it with the options --wrap for malloc, calloc, realloc, free and
 * nghttp2_session_server_new2. */
#include "session.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SESSIONS = 2,
    STREAM_IDS = 64,
    STREAMS_MAX = 8,
    UNSENT_MAX = 4096,
    LIVE_BYTES_MAX = 3 << 20, /* of two sessions with the bounds below */
    NEVER = 1 << 30,
};

#define REQUIRE(condition, text)                                                                   \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, text);                              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* ---- Allocations that fail, and how much is allocated ---- */

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *old, size_t size);
void __real_free(void *old);

static long allocations_left = NEVER;
static size_t live_bytes, http2_bytes; /* of the session; of libnghttp2 */
static bool is_measured;

static bool fails(void) { return is_measured && allocations_left-- <= 0; }

static void *noted(void *made)
{
    if (is_measured && made != NULL)
        live_bytes += malloc_usable_size(made);
    return made;
}

static void forget(void *old)
{
    if (is_measured && old != NULL)
        live_bytes -= malloc_usable_size(old);
}

void *__wrap_malloc(size_t size) { return fails() ? NULL : noted(__real_malloc(size)); }

void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : noted(__real_calloc(count, size));
}

void *__wrap_realloc(void *old, size_t size)
{
    if (fails())
        return NULL;
    forget(old);
    return noted(__real_realloc(old, size));
}

void __wrap_free(void *old)
{
    forget(old);
    __real_free(old);
}

/* The session abandons libnghttp2 when memory was exhausted: its blocks are in a list. */
typedef struct block {
    struct block *next, **link;
    size_t size, unused;
} block;

static block *blocks;

static void mem_free(void *old, void *none)
{
    (void)none;
    if (old == NULL)
        return;
    block *freed = (block *)old - 1;
    *freed->link = freed->next;
    if (freed->next != NULL)
        freed->next->link = freed->link;
    http2_bytes -= freed->size;
    __real_free(freed);
}

static void *mem_malloc(size_t size, void *none)
{
    (void)none;
    block *made = fails() ? NULL : __real_malloc(sizeof *made + size);
    if (made == NULL)
        return NULL;
    *made = (block){.next = blocks, .link = &blocks, .size = size};
    if (blocks != NULL)
        blocks->link = &made->next;
    blocks = made;
    http2_bytes += size;
    return made + 1;
}

static void *mem_realloc(void *old, size_t size, void *none)
{
    void *made = mem_malloc(size, none);
    if (made == NULL || old == NULL)
        return made;
    size_t before = ((block *)old - 1)->size;
    memcpy(made, old, before < size ? before : size);
    mem_free(old, none);
    return made;
}

static void *mem_calloc(size_t count, size_t size, void *none)
{
    void *made = mem_malloc(count * size, none);
    return made == NULL ? NULL : memset(made, 0, count * size);
}

int __wrap_nghttp2_session_server_new2(nghttp2_session **session,
                                       const nghttp2_session_callbacks *callbacks, void *context,
                                       const nghttp2_option *option)
{
    nghttp2_mem mem = {NULL, mem_malloc, mem_free, mem_calloc, mem_realloc};
    return nghttp2_session_server_new3(session, callbacks, context, option, &mem);
}

/* ---- The state of a run ---- */

typedef enum { UNUSED, UNARY, OPEN, HALF_CLOSED, OVER } life;

typedef struct {
    h2_session *session;
    life lives[STREAM_IDS]; /* by (id - 1) / 2 */
    int32_t next_id;
    uint8_t bytes[40000]; /* that the client has not sent yet */
    size_t length;
    bool has_failed;
} client;

typedef struct {
    const uint8_t *bytes;
    size_t left;
    h2_server server;
    client clients[SESSIONS];
} run;

static uint8_t next(run *r)
{
    if (r->left == 0)
        return 0;
    r->left--;
    return *r->bytes++;
}

static void add(client *c, const void *bytes, size_t length)
{
    if (length > sizeof c->bytes - c->length)
        length = sizeof c->bytes - c->length;
    if (length > 0)
        memcpy(c->bytes + c->length, bytes, length);
    c->length += length;
}

static void add_frame(client *c, uint8_t type, uint8_t flags, int32_t stream, const void *payload,
                      size_t length)
{
    const uint8_t head[9] = {(uint8_t)(length >> 16),
                             (uint8_t)(length >> 8),
                             (uint8_t)length,
                             type,
                             flags,
                             (uint8_t)(stream >> 24),
                             (uint8_t)(stream >> 16),
                             (uint8_t)(stream >> 8),
                             (uint8_t)stream};
    add(c, head, sizeof head);
    add(c, payload, length);
}

static void open_client(run *r, client *c)
{
    static const char PREFACE[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    *c = (client){.next_id = 1};
    c->session = h2_open(&r->server);
    add(c, PREFACE, sizeof PREFACE - 1);
    add_frame(c, NGHTTP2_SETTINGS, 0, 0, NULL, 0);
}

static void close_client(client *c)
{
    if (c->session != NULL)
        h2_close(c->session);
    c->session = NULL;
}

/* ---- What the server says ---- */

static void check_event(run *r, client *c, const h2_event *event)
{
    REQUIRE(event->stream > 0 && event->stream % 2 == 1, "the id of a stream");
    if (event->stream >= 2 * STREAM_IDS)
        return;
    life *is = &c->lives[event->stream / 2];
    size_t length;
    if (event->headers.length > event->path_length)
        h2_find(event->headers.bytes + event->path_length,
                event->headers.length - event->path_length, "other", 5, &length);
    switch (event->kind) {
    case H2_CALL:
        REQUIRE(*is == UNUSED, "a call on a stream that had one");
        REQUIRE(event->message.length <= r->server.bounds.message_bytes_max, "a large message");
        *is = UNARY;
        break;
    case H2_OPENED:
        REQUIRE(*is == UNUSED, "a second call");
        REQUIRE(event->headers.length <= r->server.bounds.metadata_bytes_max, "large metadata");
        *is = OPEN;
        break;
    case H2_MESSAGE:
        REQUIRE(*is == OPEN, "a message of a call that is not open");
        break;
    case H2_HALF_CLOSED:
        REQUIRE(*is == OPEN, "a second end");
        *is = HALF_CLOSED;
        break;
    default:
        REQUIRE(event->kind == H2_CLOSED && *is != UNUSED, "the end of no call");
        *is = OVER;
    }
}

static void take_events(run *r, client *c)
{
    size_t count;
    h2_event *events = h2_take_events(c->session, &count);
    for (size_t i = 0; i < count; i++) {
        if (events[i].kind != H2_NOTHING)
            check_event(r, c, &events[i]);
        h2_event_free(&events[i]);
    }
    free(events);
}

/* The server's owner does the same: after an error it sends what is left, and closes. */
static void note(run *r, client *c, bool goes_on)
{
    take_events(r, c);
    if (goes_on)
        return;
    REQUIRE(h2_why(c->session) != NULL || allocations_left < 0, "an end without a reason");
    c->has_failed = true;
}

static void check_bounds(const run *r)
{
    REQUIRE(r->server.pool_bytes <= r->server.bounds.pool_bytes_max, "the pool overflows");
    REQUIRE(live_bytes + http2_bytes <= LIVE_BYTES_MAX || allocations_left < 0,
            "the sessions hold too much memory");
    for (size_t i = 0; i < SESSIONS; i++)
        if (r->clients[i].session != NULL)
            REQUIRE(h2_streams(r->clients[i].session) <= STREAMS_MAX, "too many streams");
}

/* ---- Steps of the client ---- */

/* Flags of a step: most are usual ones, so that sessions last. */
static uint8_t next_flags(run *r, uint8_t usual)
{
    uint8_t flags = next(r);
    return next(r) < 240 ? flags & usual : flags;
}

static int32_t next_stream(run *r, const client *c)
{
    uint8_t choice = next(r), back = choice < 128 ? 2 : 2 + 2 * (choice % 8);
    if (choice < 200) /* the last one, or one of the last eight */
        return c->next_id > back ? c->next_id - back : 1;
    return choice < 250 ? choice % STREAM_IDS * 2 + 1 : choice - 250;
}

static size_t add_field(uint8_t *block, const char *name, const char *value)
{
    size_t name_length = strlen(name), value_length = strlen(value);
    uint8_t *at = block;
    *at++ = 0; /* a literal that is not indexed */
    *at++ = (uint8_t)name_length;
    memcpy(at, name, name_length);
    at += name_length;
    *at++ = (uint8_t)value_length;
    memcpy(at, value, value_length);
    return (size_t)(at + value_length - block);
}

static void step_headers(run *r, client *c)
{
    static const char *const PATHS[] = {"/unary", "/streaming", "/streaming", "/other"};
    static const char *const TYPES[] = {"application/grpc", "application/grpc+proto", "text/plain"};
    static const char *const TIMEOUTS[] = {"1S", "99999999H", "0n", "x", "123456789S", ""};
    uint8_t block[1024], choice = next(r), flags = next_flags(r, 0xa0);
    size_t length = add_field(block, ":method", choice == 255 ? "GET" : "POST");
    length += add_field(block + length, ":scheme", "http");
    length += add_field(block + length, ":path", PATHS[choice % 4]);
    length += add_field(block + length, ":authority", "localhost");
    length += add_field(block + length, "content-type", TYPES[choice > 240 ? choice % 3 : 0]);
    if (flags & 0x40)
        length += add_field(block + length, "grpc-timeout", TIMEOUTS[choice % 6]);
    if (flags & 0x20)
        length += add_field(block + length, "grpc-encoding", choice & 4 ? "gzip" : "identity");
    for (int i = flags & 0x80 ? choice % 16 : 0; i > 0; i--)
        length += add_field(block + length, "metadata", "a value of a few bytes");
    if (flags & 0x10)
        length = length / 2; /* the rest may come in a CONTINUATION, or never */
    add_frame(c, NGHTTP2_HEADERS, (flags & 8 ? 0 : 4) | (flags & 1), c->next_id, block, length);
    c->next_id += 2;
}

static void step_data(run *r, client *c)
{
    static uint8_t payload[16384];
    uint8_t choice = next(r), flags = next_flags(r, 1);
    size_t length = choice < 128 ? choice : (size_t)choice * choice / 4, sent = length;
    const uint8_t prefix[5] = {flags & 0x80 ? choice % 4 : 0, flags & 0x40 ? choice : 0, 0,
                               (uint8_t)(length >> 8), (uint8_t)length};
    uint8_t *at = payload;
    if (flags & 8)
        *at++ = next(r); /* the length of the padding */
    if (!(flags & 0x20)) {
        memcpy(at, prefix, sizeof prefix);
        at += sizeof prefix;
    }
    if (flags & 0x10)
        sent = length / 2;
    if (sent > sizeof payload - 16)
        sent = sizeof payload - 16;
    memset(at, 'm', sent);
    add_frame(c, NGHTTP2_DATA, flags & 9, next_stream(r, c), payload,
              (size_t)(at - payload) + sent);
}

/* Many small messages in one frame. */
static void step_messages(run *r, client *c)
{
    uint8_t payload[250 * 8] = {0}, count = next(r) % 250;
    for (size_t i = 0; i < count; i++)
        payload[i * 8 + 4] = 3;
    add_frame(c, NGHTTP2_DATA, 0, next_stream(r, c), payload, count * 8u);
}

static void step_small_frame(run *r, client *c)
{
    uint8_t choice = next(r), size = 1 + next(r) % 255;
    const uint8_t number[4] = {0, (uint8_t)(size >> 4), (uint8_t)(size << 4), choice};
    const uint8_t window[6] = {0, choice % 7, 0, size & 1, size, choice};
    switch (choice % 6) {
    case 0:
        if (size < 128)
            add_frame(c, NGHTTP2_RST_STREAM, 0, next_stream(r, c), number, 4);
        break;
    case 1:
        add_frame(c, NGHTTP2_WINDOW_UPDATE, 0, choice & 8 ? 0 : next_stream(r, c), number, 4);
        break;
    case 2:
        add_frame(c, NGHTTP2_SETTINGS, size > 250, 0, window, size > 250 ? 0 : 6);
        break;
    case 3:
        add_frame(c, NGHTTP2_PING, choice >> 7, 0, "shutdown", 8);
        break;
    case 4:
        add_frame(c, NGHTTP2_PRIORITY, 0, next_stream(r, c), "\0\0\0\1\20", 5);
        break;
    default:
        if (size < 32)
            add_frame(c, NGHTTP2_GOAWAY, 0, 0, "\0\0\0\1\0\0\0\0", 8);
    }
}

static void step_any_frame(run *r, client *c)
{
    uint8_t type = next(r) % 12, flags = next(r), length = next(r), payload[255];
    int32_t stream = next_stream(r, c);
    for (size_t i = 0; i < length; i++)
        payload[i] = i < 40 ? next(r) : 'p';
    add_frame(c, type, flags, stream, payload, length);
}

static void step_raw(run *r, client *c)
{
    uint8_t count = next(r) % 16;
    for (size_t i = 0; i < count; i++) {
        uint8_t byte = next(r);
        if (byte % 2 && c->length > 0)
            c->bytes[next(r) % c->length] ^= byte; /* damage bytes that wait */
        else
            add(c, &byte, 1);
    }
}

static void step_receive(run *r, client *c)
{
    size_t piece = 1u << next(r) % 16, at = 0;
    while (at < c->length) {
        size_t taken = piece < c->length - at ? piece : c->length - at;
        bool had_failed = c->has_failed;
        bool goes_on = h2_receive(c->session, c->bytes + at, taken);
        REQUIRE(!goes_on || !had_failed || allocations_left < 0, "it goes on after an error");
        note(r, c, goes_on);
        at += taken;
    }
    c->length = 0;
}

/* ---- Steps of the methods ---- */

static void step_reply(run *r, client *c)
{
    static const uint8_t message[8192];
    uint8_t choice = next(r);
    size_t length = choice < 128 ? choice : 32u * choice;
    int32_t stream = next_stream(r, c);
    if (h2_unsent(c->session, stream) > UNSENT_MAX)
        return; /* a method waits then */
    switch (choice % 4) {
    case 0:
        h2_end(c->session, stream, choice % 20, message, length % 3000);
        break;
    case 1:
        if (c->lives[stream / 2 % STREAM_IDS] == UNARY) {
            h2_reply(c->session, stream, message, length);
            break;
        } /* fall through */
    default:
        h2_send(c->session, stream, message, length);
    }
}

static void step_to_send(run *r, client *c)
{
    const uint8_t *bytes;
    size_t at_most = 1u << next(r) % 20;
    ptrdiff_t length = h2_to_send(c->session, at_most, &bytes);
    REQUIRE(length >= 0 || allocations_left < 0, "nothing can be sent");
    uint8_t sum = 0; /* the bytes can be read */
    for (ptrdiff_t i = 0; i < length; i++)
        sum ^= bytes[i];
    if (sum == 1)
        take_events(r, c);
}

static void step_time(run *r, client *c)
{
    for (int ticks = 1 + next(r) % 4; ticks > 0; ticks--)
        note(r, c, h2_tick(c->session));
}

static void step_owner(run *r, client *c)
{
    uint8_t choice = next(r);
    if (choice < 8) {
        h2_notice(c->session);
    } else if (choice < 16) {
        h2_goaway(c->session);
    } else if (choice < 24) {
        close_client(c);
        open_client(r, c);
    } else {
        h2_taken(c->session, next_stream(r, c), next(r));
        (void)h2_finished(c->session);
    }
}

static void step(run *r)
{
    uint8_t verb = next(r);
    client *c = &r->clients[verb >> 7];
    if (c->session == NULL || (c->has_failed && next(r) < 64)) {
        close_client(c);
        open_client(r, c);
        return;
    }
    static void (*const STEPS[16])(run *, client *) = {
        step_headers, step_headers, step_headers,     step_data,       step_data,    step_data,
        step_reply,   step_reply,   step_small_frame, step_receive,    step_receive, step_to_send,
        step_owner,   step_time,    step_messages,    step_small_frame};
    if ((verb & 0x7f) == 0x7f)
        step_raw(r, c);
    else if ((verb & 0x7f) == 0x7e)
        step_any_frame(r, c);
    else
        STEPS[verb % 16](r, c);
    check_bounds(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length)
{
    static run r;
    memset(&r, 0, sizeof r);
    r.bytes = bytes;
    r.left = length;
    uint8_t choice = next(&r), failure = next(&r);
    const h2_bounds bounds = {.streams_max = STREAMS_MAX,
                              .message_bytes_max = 6000,
                              .stream_message_bytes_max = 20000,
                              .metadata_bytes_max = 600,
                              .points_max = choice & 1 ? 100000 : 100,
                              .points_per_tick = 20,
                              .request_ticks = 2 + choice % 4,
                              .unread_ticks = 2 + choice % 8,
                              .keepalive_ticks = 8,
                              .ping_ticks = 4,
                              .pool_bytes_max = choice & 4 ? 64 << 10 : 1 << 20};
    live_bytes = http2_bytes = 0;
    allocations_left = choice & 2 ? NEVER : failure + 256 * (choice >> 5);
    is_measured = true;
    if (h2_server_open(&r.server, &bounds)) {
        if (h2_server_add_streaming(&r.server, "/streaming", 10))
            for (size_t i = 0; i < SESSIONS; i++)
                open_client(&r, &r.clients[i]);
        while (r.left > 0)
            step(&r);
        for (size_t i = 0; i < SESSIONS; i++)
            close_client(&r.clients[i]);
        REQUIRE(r.server.pool_bytes == 0, "the pool is not given back");
        h2_server_close(&r.server);
    }
    is_measured = false;
    REQUIRE(live_bytes == 0, "a leak");
    REQUIRE(http2_bytes == 0 || allocations_left < 0, "a leak of libnghttp2");
    while (blocks != NULL)
        mem_free(blocks + 1, NULL);
    return 0;
}
