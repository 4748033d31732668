/* The binding of the session for Python. The session collects events; this file makes Python
 * objects of them after libnghttp2 has returned, so that no Python code runs inside of it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "session.h"

static PyObject *http2_error;

/* ---- Server ---- */

/* Steals the items; returns NULL if one of them is NULL. */
static PyObject *tuple_of(PyObject **items, Py_ssize_t count)
{
    bool is_whole = true;
    for (Py_ssize_t i = 0; i < count; i++)
        is_whole = is_whole && items[i] != NULL;
    PyObject *tuple = is_whole ? PyTuple_New(count) : NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        if (tuple != NULL)
            PyTuple_SET_ITEM(tuple, i, items[i]);
        else
            Py_XDECREF(items[i]);
    return tuple;
}

typedef struct {
    PyObject ob_base;
    h2_server server;
    bool is_open;
} server_object;

static bool add_paths(server_object *self, PyObject *paths)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(paths); i++) {
        char *path;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(paths, i), &path, &length) < 0)
            return false;
        if (!h2_server_add_streaming(&self->server, path, (size_t)length)) {
            PyErr_NoMemory();
            return false;
        }
    }
    return true;
}

static PyObject *server_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"streaming",
                            "streams_max",
                            "message_bytes_max",
                            "stream_message_bytes_max",
                            "metadata_bytes_max",
                            "pool_bytes_max",
                            "points_max",
                            "points_per_tick",
                            "request_ticks",
                            "unread_ticks",
                            "keepalive_ticks",
                            "ping_ticks",
                            NULL};
    PyObject *paths;
    h2_bounds bounds;
    Py_ssize_t pool;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!$IIIInIIIIII", names, &PyTuple_Type, &paths, &bounds.streams_max,
            &bounds.message_bytes_max, &bounds.stream_message_bytes_max, &bounds.metadata_bytes_max,
            &pool, &bounds.points_max, &bounds.points_per_tick, &bounds.request_ticks,
            &bounds.unread_ticks, &bounds.keepalive_ticks, &bounds.ping_ticks))
        return NULL;
    bounds.pool_bytes_max = pool < 0 ? 0 : (size_t)pool;
    server_object *self = (server_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->is_open = h2_server_open(&self->server, &bounds);
    if (!self->is_open)
        PyErr_NoMemory();
    if (!self->is_open || !add_paths(self, paths)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void server_dealloc(server_object *self)
{
    if (self->is_open)
        h2_server_close(&self->server);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *server_refused(server_object *self, void *closure)
{
    (void)closure;
    PyObject *items[H2_STATUS_MAX + 1];
    for (size_t i = 0; i <= H2_STATUS_MAX; i++)
        items[i] = PyLong_FromUnsignedLongLong(self->server.refused[i]);
    return tuple_of(items, H2_STATUS_MAX + 1);
}

static PyObject *server_resets(server_object *self, void *closure)
{
    (void)closure;
    const h2_server *server = &self->server;
    return Py_BuildValue("{sKsKsKsKsK}", "streams", (unsigned long long)server->resets.streams,
                         "slow", (unsigned long long)server->resets.slow, "malformed",
                         (unsigned long long)server->resets.malformed, "flood",
                         (unsigned long long)server->resets.floods, "violation",
                         (unsigned long long)server->resets.violations);
}

static PyObject *server_pool_bytes(server_object *self, void *closure)
{
    (void)closure;
    return PyLong_FromSize_t(self->server.pool_bytes);
}

static PyGetSetDef server_getset[] = {
    {"refused", (getter)server_refused, NULL, "Calls that no method has answered, by status.",
     NULL},
    {"resets", (getter)server_resets, NULL, "Streams and connections without a status, by reason.",
     NULL},
    {"pool_bytes", (getter)server_pool_bytes, NULL, "Bytes of unfinished messages.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject server_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.service.grpc._http2.Server",
    .tp_doc = "What all connections of a server share: streaming paths, bounds, and the pool.",
    .tp_basicsize = sizeof(server_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = server_new,
    .tp_dealloc = (destructor)server_dealloc,
    .tp_getset = server_getset,
};

/* ---- Events ---- */

static PyObject *bytes_of(const uint8_t *bytes, size_t length)
{
    return PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)length);
}

static PyObject *event_as_tuple(const h2_event *event)
{
    PyObject *items[6] = {PyLong_FromLong(event->kind), PyLong_FromLong(event->stream)};
    Py_ssize_t count = 2;
    if (event->kind == H2_CALL || event->kind == H2_OPENED) {
        size_t path = event->path_length;
        items[count++] = bytes_of(event->headers.bytes, path);
        /* A pointer must not be moved if it is NULL: there are no headers without a path. */
        items[count++] = event->headers.length > path
                             ? bytes_of(event->headers.bytes + path, event->headers.length - path)
                             : bytes_of(NULL, 0);
        items[count++] = PyLong_FromLongLong(event->timeout_ns);
    }
    if (event->kind == H2_CALL || event->kind == H2_MESSAGE)
        items[count++] = bytes_of(event->message.bytes, event->message.length);
    return tuple_of(items, count);
}

/* The events leave the session first: making objects may run the garbage collector, and that any
 * code, which may use the session. */
static PyObject *take_events(h2_session *session)
{
    size_t count;
    h2_event *events = h2_take_events(session, &count);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < count; i++) {
        if (list != NULL && events[i].kind != H2_NOTHING) {
            PyObject *item = event_as_tuple(&events[i]);
            if (item == NULL || PyList_Append(list, item) < 0)
                Py_CLEAR(list);
            Py_XDECREF(item);
        }
        h2_event_free(&events[i]);
    }
    free(events);
    return list;
}

/* ---- Connection ---- */

typedef struct {
    PyObject ob_base;
    server_object *server;
    h2_session *session;
} connection_object;

static PyObject *connection_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", NULL};
    server_object *server;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &server_type, &server))
        return NULL;
    connection_object *self = (connection_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->server = (server_object *)Py_NewRef((PyObject *)server);
    self->session = h2_open(&server->server);
    if (self->session == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void connection_dealloc(connection_object *self)
{
    if (self->session != NULL)
        h2_close(self->session);
    Py_XDECREF((PyObject *)self->server);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *raise_why(const h2_session *session)
{
    const char *why = h2_why(session);
    PyErr_SetString(http2_error, why != NULL ? why : "the connection has ended");
    return NULL;
}

static PyObject *connection_receive(connection_object *self, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    bool goes_on = h2_receive(self->session, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return goes_on ? take_events(self->session) : raise_why(self->session);
}

static PyObject *connection_tick(connection_object *self, PyObject *none)
{
    (void)none;
    return h2_tick(self->session) ? take_events(self->session) : raise_why(self->session);
}

static PyObject *connection_to_send(connection_object *self, PyObject *argument)
{
    Py_ssize_t at_most = PyLong_AsSsize_t(argument);
    const uint8_t *bytes;
    if (at_most == -1 && PyErr_Occurred())
        return NULL;
    ptrdiff_t length = h2_to_send(self->session, at_most < 0 ? 0 : (size_t)at_most, &bytes);
    return length < 0 ? PyErr_NoMemory() : bytes_of(bytes, (size_t)length);
}

static bool read_stream(PyObject *const *args, Py_ssize_t count, Py_ssize_t expected,
                        int32_t *stream)
{
    if (count != expected) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
        return false;
    }
    long id = PyLong_AsLong(args[0]);
    if (id == -1 && PyErr_Occurred())
        return false;
    *stream = id > 0 && id <= INT32_MAX ? (int32_t)id : 0; /* 0: no stream has this id */
    return true;
}

static bool read_stream_and_bytes(PyObject *const *args, Py_ssize_t count, Py_ssize_t expected,
                                  int32_t *stream, char **bytes, Py_ssize_t *length)
{
    if (!read_stream(args, count, expected, stream) ||
        PyBytes_AsStringAndSize(args[expected - 1], bytes, length) < 0)
        return false;
    if ((size_t)*length > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a message has at most 4 GiB");
        return false;
    }
    return true;
}

static PyObject *none_or_no_memory(bool is_done)
{
    return is_done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static PyObject *connection_reply(connection_object *self, PyObject *const *args, Py_ssize_t count)
{
    int32_t stream;
    char *message;
    Py_ssize_t length;
    if (!read_stream_and_bytes(args, count, 2, &stream, &message, &length))
        return NULL;
    return none_or_no_memory(
        h2_reply(self->session, stream, (const uint8_t *)message, (size_t)length));
}

static PyObject *connection_send(connection_object *self, PyObject *const *args, Py_ssize_t count)
{
    int32_t stream;
    char *message;
    Py_ssize_t length;
    if (!read_stream_and_bytes(args, count, 2, &stream, &message, &length))
        return NULL;
    if (!h2_send(self->session, stream, (const uint8_t *)message, (size_t)length))
        return PyErr_NoMemory();
    return PyLong_FromSize_t(h2_unsent(self->session, stream));
}

static PyObject *connection_end(connection_object *self, PyObject *const *args, Py_ssize_t count)
{
    int32_t stream;
    char *text;
    Py_ssize_t length;
    if (!read_stream_and_bytes(args, count, 3, &stream, &text, &length))
        return NULL;
    long status = PyLong_AsLong(args[1]);
    if (status == -1 && PyErr_Occurred())
        return NULL;
    bool is_known = status >= 0 && status <= UINT8_MAX; /* 2: UNKNOWN */
    return none_or_no_memory(h2_end(self->session, stream, is_known ? (unsigned)status : 2,
                                    (const uint8_t *)text, (size_t)length));
}

static PyObject *connection_taken(connection_object *self, PyObject *const *args, Py_ssize_t count)
{
    int32_t stream;
    if (!read_stream(args, count, 2, &stream))
        return NULL;
    Py_ssize_t length = PyLong_AsSsize_t(args[1]);
    if (length == -1 && PyErr_Occurred())
        return NULL;
    return none_or_no_memory(h2_taken(self->session, stream, length < 0 ? 0 : (size_t)length));
}

static PyObject *connection_unsent(connection_object *self, PyObject *argument)
{
    int32_t stream;
    if (!read_stream(&argument, 1, 1, &stream))
        return NULL;
    return PyLong_FromSize_t(h2_unsent(self->session, stream));
}

static PyObject *connection_notice(connection_object *self, PyObject *none)
{
    (void)none;
    return none_or_no_memory(h2_notice(self->session));
}

static PyObject *connection_goaway(connection_object *self, PyObject *none)
{
    (void)none;
    return none_or_no_memory(h2_goaway(self->session));
}

static PyObject *connection_streams(connection_object *self, void *closure)
{
    (void)closure;
    return PyLong_FromSize_t(h2_streams(self->session));
}

static PyObject *connection_finished(connection_object *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(h2_finished(self->session));
}

#define FAST(function) (PyCFunction)(void (*)(void))(function)

static PyMethodDef connection_methods[] = {
    {"receive", (PyCFunction)connection_receive, METH_O,
     "receive($self, data, /)\n--\n\nRead bytes of the client; return events."},
    {"tick", (PyCFunction)connection_tick, METH_NOARGS,
     "tick($self, /)\n--\n\nNote that a second has passed; return events."},
    {"to_send", (PyCFunction)connection_to_send, METH_O,
     "to_send($self, at_most, /)\n--\n\nReturn bytes for the client, about `at_most`."},
    {"reply", FAST(connection_reply), METH_FASTCALL,
     "reply($self, stream, message, /)\n--\n\nEnd a call with a message and the status OK."},
    {"send", FAST(connection_send), METH_FASTCALL,
     "send($self, stream, message, /)\n--\n\nSend a message; return how many bytes wait."},
    {"end", FAST(connection_end), METH_FASTCALL,
     "end($self, stream, status, text, /)\n--\n\nEnd a call with a status."},
    {"taken", FAST(connection_taken), METH_FASTCALL,
     "taken($self, stream, length, /)\n--\n\nNote that a method has taken a message."},
    {"unsent", (PyCFunction)connection_unsent, METH_O,
     "unsent($self, stream, /)\n--\n\nReturn how many bytes of a stream wait."},
    {"notice", (PyCFunction)connection_notice, METH_NOARGS,
     "notice($self, /)\n--\n\nAnnounce the shutdown; GOAWAY follows when the client knows."},
    {"goaway", (PyCFunction)connection_goaway, METH_NOARGS,
     "goaway($self, /)\n--\n\nAccept no more calls."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef connection_getset[] = {
    {"streams", (getter)connection_streams, NULL, "The number of open streams.", NULL},
    {"finished", (getter)connection_finished, NULL, "Nothing is left to read or send.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyTypeObject connection_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.service.grpc._http2.Connection",
    .tp_doc = "One HTTP/2 connection of a gRPC server.",
    .tp_basicsize = sizeof(connection_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = connection_new,
    .tp_dealloc = (destructor)connection_dealloc,
    .tp_methods = connection_methods,
    .tp_getset = connection_getset,
};

/* ---- The module ---- */

static PyObject *find(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    char *fields;
    Py_ssize_t length, name_length;
    size_t value_length;
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", count);
        return NULL;
    }
    const char *name = PyUnicode_AsUTF8AndSize(args[1], &name_length);
    if (name == NULL || PyBytes_AsStringAndSize(args[0], &fields, &length) < 0)
        return NULL;
    const char *value =
        h2_find((const uint8_t *)fields, (size_t)length, name, (size_t)name_length, &value_length);
    if (value == NULL)
        return Py_NewRef(Py_None);
    for (size_t i = 0; i < value_length; i++)
        if ((signed char)value[i] < 0)
            return Py_NewRef(Py_None); /* gRPC allows ASCII only */
    return PyUnicode_FromStringAndSize(value, (Py_ssize_t)value_length);
}

static PyMethodDef module_methods[] = {
    {"find", FAST(find), METH_FASTCALL,
     "find($module, metadata, name, /)\n--\n\nReturn the first value of a name, or None."},
    {NULL, NULL, 0, NULL}};

static int add_contents(PyObject *module);

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_contents},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ratekeeper.service.grpc._http2",
    .m_doc = "HTTP/2 connections of a gRPC server, on libnghttp2.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

static int add_contents(PyObject *module)
{
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) { /* the types are static */
        PyErr_SetString(PyExc_ImportError, "gRPC on libnghttp2 runs in the main interpreter only");
        return -1;
    }
    http2_error = PyErr_NewExceptionWithDoc("ratekeeper.service.grpc._http2.Http2Error",
                                            "The connection has to end.", NULL, NULL);
    bool added =
        http2_error != NULL && PyModule_AddObjectRef(module, "Http2Error", http2_error) == 0 &&
        PyModule_AddType(module, &server_type) == 0 &&
        PyModule_AddType(module, &connection_type) == 0 &&
        PyModule_AddIntConstant(module, "CALL", H2_CALL) == 0 &&
        PyModule_AddIntConstant(module, "OPENED", H2_OPENED) == 0 &&
        PyModule_AddIntConstant(module, "MESSAGE", H2_MESSAGE) == 0 &&
        PyModule_AddIntConstant(module, "HALF_CLOSED", H2_HALF_CLOSED) == 0 &&
        PyModule_AddIntConstant(module, "CLOSED", H2_CLOSED) == 0 &&
        PyModule_AddStringConstant(module, "VERSION", nghttp2_version(0)->version_str) == 0;
    return added ? 0 : -1;
}

PyMODINIT_FUNC PyInit__http2(void) { return PyModuleDef_Init(&module_def); }
