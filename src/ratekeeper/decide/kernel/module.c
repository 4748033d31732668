/* The binding of the table for Python. It is thin: one C call from `Limiter.check` to the decision
 * and back. A check takes this fast path only if everything about it is ordinary (a plain str key,
 * a small cost, real time). All other checks, and every error, go to the Python path (`slow`),
 * which validates, explains and applies the failure policy. So special cases are handled once, in
 * Python. */
#include "module.h"

#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

/* Longer than a preempted owner waits to be scheduled again, and short enough to be noticed. */
static const int64_t LOCK_WAIT_NS = 1000000000;
enum { KEY_LENGTH_MAX = 512, SEPARATOR = 0x1f };

PyObject *rk_error_unavailable;
static PyObject *error_capacity, *error_full, *error_timeout, *error_config, *error_store;
static PyObject *decision_repr, *decision_fields, *python_decision, *seconds_from_ns;
static int bypass;         /* a test has replaced the clock or switched limiting off */
static int clock_replaced; /* a test has replaced the clock */

/* ---- Decision ---- */

typedef struct {
    PyObject_HEAD PyObject *policy, *rule, *source;
    int64_t remaining, retry_after_ns, reset_after_ns, delay_ns, charged_ns, decided_ns, granted;
    bool allowed;
} decision_object;

static PyTypeObject decision_type;

/* Decisions live for microseconds; keeping a few for reuse saves allocations. */
enum { SPARE_MAX = 64 };
static decision_object *spare[SPARE_MAX];
static int spare_count;

PyObject *rk_make_decision(PyObject *limits, PyObject *rule, const rk_decision *decided)
{
    decision_object *self;
    if (spare_count > 0) {
        self = spare[--spare_count];
        Py_SET_REFCNT(self, 1); /* it still has its type; PyObject_Init takes a nanosecond more */
    } else if ((self = PyObject_New(decision_object, &decision_type)) == NULL) {
        return NULL;
    }
    self->policy = Py_NewRef(PyTuple_GET_ITEM(limits, decided->speaker));
    self->rule = Py_NewRef(rule);
    self->source = NULL;
    self->allowed = decided->allowed;
    self->remaining = decided->remaining;
    self->retry_after_ns = decided->retry_after_ns;
    self->reset_after_ns = decided->reset_after_ns;
    self->delay_ns = decided->delay_ns;
    self->charged_ns = decided->charged_ns;
    self->decided_ns = decided->decided_ns;
    self->granted = decided->granted;
    return (PyObject *)self;
}

void rk_set_source(PyObject *decision, PyObject *source)
{
    Py_XSETREF(((decision_object *)decision)->source, source);
}

static void decision_dealloc(decision_object *self)
{
    Py_DECREF(self->policy);
    Py_DECREF(self->rule);
    Py_XDECREF(self->source);
    if (spare_count < SPARE_MAX)
        spare[spare_count++] = self;
    else
        PyObject_Free(self);
}

static PyObject *get_allowed(decision_object *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->allowed);
}

static PyObject *get_degraded(decision_object *self, void *unused)
{
    (void)self, (void)unused;
    Py_RETURN_FALSE; /* the kernel's decisions are never degraded */
}

static PyObject *get_penalty(decision_object *self, void *unused)
{
    (void)self, (void)unused;
    Py_RETURN_NONE; /* rules give penalties, and the kernel decides limits only */
}

static PyObject *get_policy(decision_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->policy);
}

static PyObject *get_rule(decision_object *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->rule);
}

static PyObject *get_limit(decision_object *self, void *unused)
{
    (void)unused;
    PyObject *capacity = PyObject_GetAttrString(self->policy, "capacity");
    if (capacity == NULL || self->granted == 0)
        return capacity;
    long long units = PyLong_AsLongLong(capacity);
    Py_DECREF(capacity);
    return units == -1 && PyErr_Occurred() ? NULL : PyLong_FromLongLong(units + self->granted);
}

/* The closure is the field's offset. */
static PyObject *get_integer(decision_object *self, void *offset)
{
    return PyLong_FromLongLong(*(int64_t *)((char *)self + (size_t)offset));
}

static PyObject *get_charged_ns(decision_object *self, void *unused)
{
    (void)unused;
    if (self->charged_ns == RK_NO_TIME)
        Py_RETURN_NONE;
    return PyLong_FromLongLong(self->charged_ns);
}

static int64_t ns_from_seconds(double seconds)
{
    int64_t whole = (int64_t)seconds;
    return whole * 1000000000 + (int64_t)nearbyint((seconds - (double)whole) * 1e9);
}

/* As clock.seconds_from_ns: never rounded down. Above 2**53, nanoseconds do not fit a double, so
 * Python divides the exact number. */
static PyObject *get_seconds(decision_object *self, void *offset)
{
    int64_t ns = *(int64_t *)((char *)self + (size_t)offset);
    if (ns > (int64_t)1 << 53)
        return PyObject_CallFunction(seconds_from_ns, "L", (long long)ns);
    double seconds = (double)ns / 1e9;
    while (ns_from_seconds(seconds) < ns)
        seconds += fabs(seconds) * 0x1p-52;
    return PyFloat_FromDouble(seconds);
}

#define FIELD(name) ((void *)offsetof(decision_object, name))
static PyGetSetDef decision_attributes[] = {
    {"allowed", (getter)get_allowed, NULL, "Whether the request may proceed.", NULL},
    {"policy", (getter)get_policy, NULL, "The tightest limit.", NULL},
    {"limit", (getter)get_limit, NULL, "The tightest limit's capacity, and granted units.", NULL},
    {"remaining", (getter)get_integer, NULL, "Requests of cost 1 that would be allowed now.",
     FIELD(remaining)},
    {"retry_after_ns", (getter)get_integer, NULL, "Nanoseconds until this cost would be allowed.",
     FIELD(retry_after_ns)},
    {"retry_after", (getter)get_seconds, NULL, "Seconds until this cost would be allowed.",
     FIELD(retry_after_ns)},
    {"reset_after_ns", (getter)get_integer, NULL, "Nanoseconds until the whole quota is available.",
     FIELD(reset_after_ns)},
    {"reset_after", (getter)get_seconds, NULL, "Seconds until the whole quota is available.",
     FIELD(reset_after_ns)},
    {"delay_ns", (getter)get_integer, NULL, "Nanoseconds to hold the request.", FIELD(delay_ns)},
    {"delay", (getter)get_seconds, NULL, "Seconds to hold the request.", FIELD(delay_ns)},
    {"rule", (getter)get_rule, NULL, "The limiter's name, or the rule's id.", NULL},
    {"degraded", (getter)get_degraded, NULL, "Always false here.", NULL},
    {"charged_ns", (getter)get_charged_ns, NULL, "The time of the charge; None if there is none.",
     NULL},
    {"decided_ns", (getter)get_integer, NULL, "The table's time of the decision.",
     FIELD(decided_ns)},
    {"granted", (getter)get_integer, NULL, "Granted units that are left.", FIELD(granted)},
    {"penalty", (getter)get_penalty, NULL, "Always None here.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Set by the rule engine; None before. */
static PyMemberDef decision_members[] = {
    {"source", T_OBJECT, offsetof(decision_object, source), 0, "What a refund of it needs."},
    {NULL, 0, 0, 0, NULL},
};

static int decision_bool(PyObject *self) { return ((decision_object *)self)->allowed; }

static PyObject *decision_to_repr(PyObject *self)
{
    return PyObject_CallOneArg(decision_repr, self);
}

static PyObject *decision_compare(PyObject *self, PyObject *other, int operation)
{
    if (operation != Py_EQ && operation != Py_NE)
        Py_RETURN_NOTIMPLEMENTED;
    int comparable = PyObject_IsInstance(other, python_decision);
    if (comparable < 0)
        return NULL;
    if (!comparable)
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *result = NULL, *mine = PyObject_CallOneArg(decision_fields, self);
    PyObject *theirs = mine ? PyObject_CallOneArg(decision_fields, other) : NULL;
    if (theirs)
        result = PyObject_RichCompare(mine, theirs, operation);
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return result;
}

static Py_hash_t decision_hash(PyObject *self)
{
    PyObject *fields = PyObject_CallOneArg(decision_fields, self);
    Py_hash_t hash = fields ? PyObject_Hash(fields) : -1;
    Py_XDECREF(fields);
    return hash;
}

static PyObject *decision_reduce(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *fields = PyObject_CallOneArg(decision_fields, self);
    return fields ? Py_BuildValue("(ON)", python_decision, fields) : NULL;
}

static PyMethodDef decision_methods[] = {
    {"__reduce__", decision_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyNumberMethods decision_number = {.nb_bool = decision_bool};

static PyTypeObject decision_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.Decision",
    .tp_doc = "A decision made by the kernel; see ratekeeper.Decision.",
    .tp_basicsize = sizeof(decision_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)decision_dealloc,
    .tp_getset = decision_attributes,
    .tp_members = decision_members,
    .tp_methods = decision_methods,
    .tp_as_number = &decision_number,
    .tp_repr = decision_to_repr,
    .tp_richcompare = decision_compare,
    .tp_hash = decision_hash,
};

/* ---- Table ---- */

PyTypeObject rk_table_type;

/* Open the table with the interpreter's lock released. Return NULL with an exception, or the table
 * with a text that says why a damaged file was created again, which is usually empty. */
static rk_table *open_table(const rk_options *options, PyObject **notice)
{
    rk_status status;
    char error[RK_ERROR_BYTES] = "";
    rk_table *table;
    Py_BEGIN_ALLOW_THREADS table = rk_open(options, &status, error);
    Py_END_ALLOW_THREADS *notice = PyUnicode_DecodeFSDefault(error);
    if (table != NULL && *notice != NULL)
        return table;
    if (table != NULL)
        rk_close(table);
    if (*notice != NULL)
        PyErr_SetObject(status == RK_MISMATCH ? error_config : rk_error_unavailable, *notice);
    Py_CLEAR(*notice);
    return NULL;
}

PyObject *rk_table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"path",    "capacity", "log_bytes", "mode", "epoch_offset_ns",
                            "on_loss", "now",      "is_real",   NULL};
    PyObject *path = Py_None, *on_loss = Py_None, *now = Py_None;
    int is_real = 0;
    rk_options options = {.path = NULL};
    unsigned long long capacity = 0, log_bytes = 0;
    long long epoch_offset_ns = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$KKILOOp", names, &path, &capacity,
                                     &log_bytes, &options.mode, &epoch_offset_ns, &on_loss, &now,
                                     &is_real))
        return NULL;
    rk_table_object *self = (rk_table_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->on_loss = Py_NewRef(on_loss);
    self->now = now == Py_None ? NULL : Py_NewRef(now);
    self->is_real = is_real;
    if (path != Py_None && !PyUnicode_FSConverter(path, &self->path)) {
        Py_DECREF(self);
        return NULL;
    }
    options.path = self->path ? PyBytes_AS_STRING(self->path) : NULL;
    options.capacity = capacity;
    options.log_bytes = log_bytes;
    options.epoch_offset_ns = epoch_offset_ns;
    options.allowances = type == &rk_allowances_type;
    self->options = options;
    self->table = open_table(&options, &self->notice);
    if (self->table == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Between leave and back the interpreter's lock is released; a close() meanwhile is deferred. */
PyThreadState *rk_leave(rk_table_object *self)
{
    if (self->away_in != getpid())
        self->away = 0;
    self->away_in = getpid();
    self->away++;
    return PyEval_SaveThread();
}

/* Close the memory that is no longer in use, once no thread is in it. */
static void close_unused(rk_table_object *self)
{
    if (self->away > 0 && self->away_in == getpid())
        return;
    if (self->retired != NULL)
        rk_close(self->retired);
    self->retired = NULL;
    if (self->closing && self->table != NULL) {
        rk_close(self->table);
        self->table = NULL;
    }
}

void rk_back(rk_table_object *self, PyThreadState *thread)
{
    PyEval_RestoreThread(thread);
    self->away--;
    close_unused(self);
}

bool rk_table_is_open(rk_table_object *self)
{
    if (self->table != NULL && !self->closing)
        return true;
    PyErr_SetString(rk_error_unavailable, "the store is closed; open another one");
    return false;
}

/* Raise StoreUnavailable for a lost file. Before that, `on_loss` may open it again for the next
 * call, or raise an error that says why it cannot. */
static PyObject *raise_lost(rk_table_object *self)
{
    char text[RK_ERROR_BYTES];
    bool lost = rk_loss_text(self->table, text);
    PyObject *result = NULL, *message = PyUnicode_DecodeFSDefault(text);
    if (message != NULL && lost && self->on_loss != Py_None)
        result = PyObject_CallFunctionObjArgs(self->on_loss, self, message, NULL);
    if (message != NULL && !PyErr_Occurred())
        PyErr_SetObject(rk_error_unavailable, message);
    Py_XDECREF(result);
    Py_XDECREF(message);
    return NULL;
}

PyObject *rk_raise_status(rk_table_object *self, rk_status status)
{
    if (!rk_table_is_open(self))
        return NULL;
    if (status == RK_LOST)
        return raise_lost(self);
    if (status == RK_FULL)
        PyErr_SetString(error_full, "every slot for this key holds a key that is still limited; "
                                    "choose a larger ?capacity=");
    else if (status == RK_CROWDED)
        PyErr_SetString(error_full,
                        "this key holds some hundreds of limits of one name, more than one key may "
                        "have of it; give limits that differ in algorithm or window other names. A "
                        "larger ?capacity= does not help");
    else if (status == RK_LOG_FULL)
        PyErr_SetString(error_full,
                        "the rule has used up its part of the memory for sliding "
                        "window logs and requests in flight; choose a larger ?log_bytes=");
    else if (status == RK_BUSY)
        PyErr_SetString(error_timeout, "another process has held the table's lock for 1 s; "
                                       "is it stopped?");
    else
        PyErr_SetString(rk_error_unavailable,
                        "this process was forked and could not open the file again: it is out of "
                        "descriptors, or has no permission");
    return NULL;
}

PyObject *rk_table_close(rk_table_object *self, PyObject *unused)
{
    (void)unused;
    self->closing = true;
    close_unused(self);
    Py_RETURN_NONE;
}

PyObject *rk_table_reopen(rk_table_object *self, PyObject *unused)
{
    (void)unused;
    PyObject *notice;
    if (!rk_table_is_open(self))
        return NULL;
    rk_table *opened = open_table(&self->options, &notice);
    if (opened == NULL)
        return NULL;
    if (self->retired != NULL ||
        !rk_table_is_open(self)) { /* another thread was faster, or closed it */
        rk_close(opened);
        Py_DECREF(notice);
        return PyErr_Occurred() ? NULL : PyUnicode_FromString("");
    }
    self->retired = self->table;
    self->table = opened;
    close_unused(self);
    return notice;
}

int rk_table_traverse(rk_table_object *self, visitproc visit, void *arg)
{
    Py_VISIT(self->on_loss);
    Py_VISIT(self->now);
    return 0;
}

int rk_table_clear(rk_table_object *self)
{
    Py_CLEAR(self->now);
    return 0;
}

void rk_table_dealloc(rk_table_object *self)
{
    PyObject_GC_UnTrack(self);
    if (self->retired != NULL)
        rk_close(self->retired);
    if (self->table != NULL)
        rk_close(self->table);
    Py_XDECREF(self->path);
    Py_XDECREF(self->notice);
    Py_XDECREF(self->on_loss);
    Py_XDECREF(self->now);
    Py_TYPE(self)->tp_free(self);
}

PyObject *rk_table_now_ns(rk_table_object *self, PyObject *unused)
{
    (void)unused;
    return rk_table_is_open(self) ? PyLong_FromLongLong(rk_now_ns(self->table)) : NULL;
}

bool rk_parse_now(rk_table_object *self, PyObject *value, int64_t *now_ns)
{
    int64_t real_ns = rk_now_ns(self->table); /* examines the file, whatever the clock */
    if (value == Py_None && (self->now == NULL || (self->is_real && !clock_replaced))) {
        *now_ns = real_ns;
        return true;
    }
    PyObject *read = value == Py_None ? PyObject_CallNoArgs(self->now) : Py_NewRef(value);
    if (read == NULL)
        return false;
    *now_ns = PyLong_AsLongLong(read);
    Py_DECREF(read);
    if (*now_ns == -1 && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return false;
    if (PyErr_Occurred() || *now_ns < RK_NOW_NS_MIN || *now_ns > RK_NOW_NS_MAX) {
        PyErr_Clear();
        PyErr_SetString(error_config, "the clock's time is not between 1938 and 2096");
        return false;
    }
    return true;
}

static PyObject *table_sweep(rk_table_object *self, PyObject *now)
{
    int64_t now_ns;
    uint64_t dropped;
    if (!rk_table_is_open(self) || !rk_parse_now(self, now, &now_ns))
        return NULL;
    if (!rk_table_is_open(self)) /* again: reading `now` may have run any code */
        return NULL;
    PyThreadState *thread = rk_is_shared(self->table) ? rk_leave(self) : NULL;
    rk_status status = rk_sweep(self->table, now_ns, &dropped);
    if (thread != NULL)
        rk_back(self, thread);
    return status == RK_OK ? PyLong_FromUnsignedLongLong(dropped) : rk_raise_status(self, status);
}

static PyObject *stats_dict(const rk_stats *stats)
{
    return Py_BuildValue("{sKsKsKsKsKsKsKsKsK}", "states", stats->states, "states_max",
                         stats->states_max, "bytes", stats->bytes, "expired", stats->expired,
                         "refused", stats->refused, "crowded", stats->crowded, "repaired",
                         stats->repaired, "log_bytes_used", stats->log_bytes_used, "log_bytes_max",
                         stats->log_bytes_max);
}

static PyObject *table_stats(rk_table_object *self, PyObject *unused)
{
    (void)unused;
    rk_stats stats;
    if (!rk_table_is_open(self))
        return NULL;
    rk_now_ns(self->table); /* examines the file */
    PyThreadState *thread = rk_is_shared(self->table) ? rk_leave(self) : NULL;
    rk_status status = rk_read_stats(self->table, &stats);
    if (thread != NULL)
        rk_back(self, thread);
    if (status != RK_OK)
        return rk_raise_status(self, status);
    return stats_dict(&stats);
}

/* mark(subject, name, now_ns, lasts_ns): a new name has lasts_ns above 0; 0 forgets it. */
static PyObject *table_mark(rk_table_object *self, PyObject *args)
{
    const char *bytes;
    Py_ssize_t length;
    long long name, lasts_ns;
    PyObject *now;
    int64_t now_ns;
    if (!PyArg_ParseTuple(args, "s#LOL", &bytes, &length, &name, &now, &lasts_ns) ||
        !rk_table_is_open(self) || !rk_parse_now(self, now, &now_ns) || !rk_table_is_open(self))
        return NULL;
    rk_hash subject = rk_subject_hash(self->table, bytes, (size_t)length);
    rk_hash hash = rk_group_hash(subject, RK_MARKS_RULE);
    rk_status status;
    bool is_new = false;
    do {
        status = lasts_ns > 0 ? rk_mark(self->table, hash, name, now_ns, lasts_ns, &is_new)
                              : rk_unmark(self->table, hash, name, now_ns);
    } while (rk_try_again(self, rk_wait, hash, &status));
    return status == RK_OK ? PyBool_FromLong(is_new) : rk_raise_status(self, status);
}

static PyObject *table_check_all(rk_table_object *self, PyObject *const *args, Py_ssize_t nargs);

static PyMethodDef table_methods[] = {
    {"check_all", (PyCFunction)(void (*)(void))table_check_all, METH_FASTCALL,
     "check_all($self, checks, optional=(), now_ns=None, /)\n--\n\nSee Store.check_together."},
    {"close", (PyCFunction)rk_table_close, METH_NOARGS, "Unmap the memory."},
    {"reopen", (PyCFunction)rk_table_reopen, METH_NOARGS,
     "Open a lost file again; return why it was created again, or an empty text."},
    {"now_ns", (PyCFunction)rk_table_now_ns, METH_NOARGS, "Return the table's time."},
    {"sweep", (PyCFunction)table_sweep, METH_O, "Drop expired states; return their number."},
    {"stats", (PyCFunction)table_stats, METH_NOARGS, "Return the table's numbers."},
    {"mark", (PyCFunction)table_mark, METH_VARARGS,
     "mark(subject, name, now_ns, lasts_ns): remember a name; return whether it was not known."},
    {NULL, NULL, 0, NULL},
};

PyMemberDef rk_table_members[] = {
    {"notice", T_OBJECT, offsetof(rk_table_object, notice), READONLY,
     "Why a damaged file was created again; usually empty."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject rk_table_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.Table",
    .tp_doc = "Quotas in one block of memory, of this process or of a file.",
    .tp_basicsize = sizeof(rk_table_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = rk_table_new,
    .tp_dealloc = (destructor)rk_table_dealloc,
    .tp_traverse = (traverseproc)rk_table_traverse,
    .tp_clear = (inquiry)rk_table_clear,
    .tp_methods = table_methods,
    .tp_members = rk_table_members,
};

/* ---- Counter ---- */

typedef rk_counter_object counter_object;

static PyTypeObject fast_check_type;

static const char *const ALGORITHMS[] = {
    "token_bucket",           "leaky_bucket", "sliding_window_log",
    "sliding_window_counter", "fixed_window", "in_flight",
};
enum { ALGORITHM_COUNT = sizeof ALGORITHMS / sizeof *ALGORITHMS };

static bool read_number(PyObject *limit, const char *name, int64_t *number)
{
    PyObject *value = PyObject_GetAttrString(limit, name);
    *number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return !PyErr_Occurred();
}

static bool read_algorithm(PyObject *limit, rk_limit *numbers)
{
    PyObject *name = PyObject_GetAttrString(limit, "algorithm");
    if (name == NULL)
        return false;
    for (int i = 0; i < ALGORITHM_COUNT; i++)
        if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, ALGORITHMS[i]) == 0) {
            numbers->algorithm = (rk_algorithm)i;
            Py_DECREF(name);
            return true;
        }
    PyErr_Format(error_config, "the kernel has no algorithm %R", name);
    Py_DECREF(name);
    return false;
}

/* The location of a limit's states depends on the rule's name and the limit's identity, and not on
 * numbers that may change. */
static bool read_identity(counter_object *self, PyObject *limit, rk_limit *numbers)
{
    PyObject *identity = PyObject_GetAttrString(limit, "identity");
    PyObject *full =
        identity ? PyUnicode_FromFormat("%U%c%U", self->rule, SEPARATOR, identity) : NULL;
    Py_ssize_t length = 0;
    const char *text = full ? PyUnicode_AsUTF8AndSize(full, &length) : NULL;
    if (text != NULL) {
        rk_hash hash = rk_limit_salt(text, (size_t)length);
        numbers->salt[0] = hash.low;
        numbers->salt[1] = hash.high;
        const char *rule = PyUnicode_AsUTF8AndSize(self->rule, &length);
        if (rule != NULL)
            numbers->rule = rk_limit_salt(rule, (size_t)length).low;
        else
            text = NULL;
    }
    Py_XDECREF(identity);
    Py_XDECREF(full);
    return text != NULL;
}

static bool fits_slab(counter_object *self, PyObject *limit, const rk_limit *numbers)
{
    bool in_flight = numbers->algorithm == RK_IN_FLIGHT;
    if (numbers->algorithm != RK_SLIDING_WINDOW_LOG && !in_flight)
        return true;
    if (!rk_table_is_open(self->table)) /* reading attributes may have run any code */
        return false;
    unsigned long long needed = rk_log_bytes_needed(numbers->limit * (in_flight ? 2 : 1));
    unsigned long long there = rk_log_bytes(self->table->table);
    if (needed <= there)
        return true;
    PyErr_Format(error_config,
                 "%R needs up to %llu bytes for one key's log, and the store has %llu for all; "
                 "make it with a larger ?log_bytes=, or choose another algorithm",
                 limit, needed, there);
    return false;
}

static bool read_limit(counter_object *self, PyObject *limit, rk_limit *numbers)
{
    return read_algorithm(limit, numbers) && read_number(limit, "limit", &numbers->limit) &&
           read_number(limit, "capacity", &numbers->capacity) &&
           read_number(limit, "window_ns", &numbers->window_ns) &&
           read_number(limit, "micros_numerator", &numbers->numerator) &&
           read_number(limit, "ns_denominator", &numbers->denominator) &&
           read_number(limit, "refill_step_ns", &numbers->step_ns) &&
           read_number(limit, "debt_max", &numbers->debt_max) &&
           read_identity(self, limit, numbers) && fits_slab(self, limit, numbers);
}

static PyObject *counter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"table", "limits", "rule", NULL};
    PyObject *table, *limits, *rule;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!U", names, &rk_table_type, &table,
                                     &PyTuple_Type, &limits, &rule))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(limits);
    if (count < 1 || count > RK_LIMITS_MAX) {
        PyErr_Format(error_config, "a counter has 1 to %d limits, not %zd", RK_LIMITS_MAX, count);
        return NULL;
    }
    if (!rk_table_is_open((rk_table_object *)table))
        return NULL;
    counter_object *self = (counter_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->table = (rk_table_object *)Py_NewRef(table);
    self->limits = Py_NewRef(limits);
    self->rule = Py_NewRef(rule);
    self->count = (int)count;
    for (int i = 0; i < self->count; i++)
        if (!read_limit(self, PyTuple_GET_ITEM(limits, i), &self->numbers[i])) {
            Py_DECREF(self);
            return NULL;
        }
    return (PyObject *)self;
}

static int counter_traverse(counter_object *self, visitproc visit, void *arg)
{
    Py_VISIT(self->table);
    Py_VISIT(self->limits);
    Py_VISIT(self->rule);
    Py_VISIT(self->slow);
    return 0;
}

static int counter_clear(counter_object *self)
{
    Py_CLEAR(self->slow);
    return 0;
}

static void counter_dealloc(counter_object *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->table);
    Py_XDECREF(self->limits);
    Py_XDECREF(self->rule);
    Py_XDECREF(self->slow);
    Py_TYPE(self)->tp_free(self);
}

bool rk_try_again(rk_table_object *self, rk_wait_function wait, rk_hash hash, rk_status *status)
{
    if (*status != RK_BUSY || self->waited)
        return false;
    const rk_table *before = self->table;
    PyThreadState *thread = rk_leave(self);
    *status = wait(self->table, hash, LOCK_WAIT_NS);
    rk_back(self, thread);
    if (self->table == NULL)
        *status = RK_UNAVAILABLE;
    else if (self->table != before) /* another seed, for which the hash is wrong */
        *status = RK_LOST;
    return *status == RK_OK;
}

static bool try_again(counter_object *self, rk_hash hash, rk_status *status)
{
    return rk_try_again(self->table, rk_wait, hash, status);
}

static rk_status check_hash(counter_object *self, rk_hash hash, int64_t now_ns, int64_t cost,
                            bool spend, rk_decision *decision)
{
    rk_status status;
    do {
        status = rk_check(self->table->table, hash, self->numbers, self->count, now_ns, cost, spend,
                          decision);
    } while (__builtin_expect(status == RK_BUSY, 0) && try_again(self, hash, &status));
    return status;
}

/* Return the bytes of a plain key: a str of 1 to 512 characters without the separator. */
static const char *plain_key(PyObject *key, Py_ssize_t *length)
{
    if (!PyUnicode_CheckExact(key))
        return NULL;
    Py_ssize_t characters = PyUnicode_GET_LENGTH(key);
    if (characters < 1 || characters > KEY_LENGTH_MAX)
        return NULL;
    const char *bytes;
    if (PyUnicode_IS_COMPACT_ASCII(key)) {
        bytes = (const char *)PyUnicode_1BYTE_DATA(key);
        *length = characters;
    } else {
        bytes = PyUnicode_AsUTF8AndSize(key, length);
        if (bytes == NULL) {
            PyErr_Clear(); /* half of a surrogate pair: the slow path raises the error */
            return NULL;
        }
    }
    return memchr(bytes, SEPARATOR, (size_t)*length) ? NULL : bytes;
}

const char *rk_plain_check(rk_table_object *table, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames, Py_ssize_t *length, int64_t *cost)
{
    *cost = 1;
    if (nargs < 1 || bypass || table->table == NULL || table->closing)
        return NULL;
    if (nargs + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0) == 2) {
        /* The second argument is the cost, keyword or not: the slow path rejects a wrong keyword.
         */
        if (kwnames && !(nargs == 1 && PyUnicode_CompareWithASCIIString(
                                           PyTuple_GET_ITEM(kwnames, 0), "cost") == 0))
            return NULL;
        if (!PyLong_CheckExact(args[1]))
            return NULL;
        int overflow;
        *cost = PyLong_AsLongLongAndOverflow(args[1], &overflow);
        if (overflow || *cost < 0 || *cost > RK_UNITS_MAX)
            return NULL;
    } else if (nargs != 1 || kwnames) {
        return NULL;
    }
    return plain_key(args[0], length);
}

/* The hash of a subject under the rule of a counter. */
static rk_hash hash_of(const counter_object *counter, const char *bytes, Py_ssize_t length)
{
    return rk_group_hash(rk_subject_hash(counter->table->table, bytes, (size_t)length),
                         counter->numbers[0].rule);
}

/* check(key, cost=1), the fast path. */
static PyObject *fast_check_check(counter_object *self, PyObject *const *args, Py_ssize_t nargs,
                                  PyObject *kwnames)
{
    int64_t cost;
    Py_ssize_t length;
    const char *bytes = rk_plain_check(self->table, args, nargs, kwnames, &length, &cost);
    if (bytes == NULL)
        goto slow;
    rk_decision decision;
    rk_table *table = self->table->table;
    rk_hash hash = hash_of(self, bytes, length);
    rk_status status = check_hash(self, hash, rk_now_ns(table), cost, true, &decision);
    if (status != RK_OK) {
        self->table->waited = status == RK_BUSY;
        goto slow;
    }
    if (decision.allowed)
        self->allowed++;
    else
        self->denied++;
    return rk_make_decision(self->limits, self->rule, &decision);
slow:
    if (self->slow == NULL) { /* cleared by the garbage collector */
        PyErr_SetString(rk_error_unavailable, "the limiter was deleted");
        return NULL;
    }
    return PyObject_Vectorcall(self->slow, args, (size_t)nargs, kwnames);
}

/* Read a number of units. More than any capacity with any credit is as much as just above it. */
static bool parse_units(PyObject *value, int64_t *units)
{
    int overflow;
    *units = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (*units == -1 && !overflow && PyErr_Occurred())
        return false;
    if (overflow || *units > (int64_t)RK_UNITS_MAX * 2)
        *units = (int64_t)RK_UNITS_MAX * 2 + 1;
    return true;
}

/* Read the arguments that the verbs share. */
static bool parse_call(counter_object *self, PyObject *subject, PyObject *units, PyObject *now,
                       rk_change *parsed)
{
    Py_ssize_t length;
    const char *bytes = PyUnicode_AsUTF8AndSize(subject, &length);
    if (bytes == NULL || (units != NULL && !parse_units(units, &parsed->units)))
        return false;
    /* Last, because the conversions may have run any code, including close(). */
    if (!rk_table_is_open(self->table) || !rk_parse_now(self->table, now, &parsed->now_ns) ||
        !rk_table_is_open(self->table))
        return false;
    parsed->subject = hash_of(self, bytes, length);
    parsed->limits = self->numbers;
    parsed->count = self->count;
    return true;
}

static PyObject *raise_capacity(counter_object *counter, PyObject *cost, int limit)
{
    PyObject *error = PyObject_CallFunctionObjArgs(error_capacity, cost,
                                                   PyTuple_GET_ITEM(counter->limits, limit), NULL);
    if (error != NULL)
        PyErr_SetObject(error_capacity, error);
    Py_XDECREF(error);
    return NULL;
}

static bool is_refusal(rk_status status)
{
    return status == RK_FULL || status == RK_LOG_FULL || status == RK_CROWDED;
}

static PyObject *decide(counter_object *self, PyObject *const *args, Py_ssize_t nargs, bool spend)
{
    rk_change c;
    if (nargs != 2 && nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "expected a subject, a cost, and perhaps a time");
        return NULL;
    }
    if (!parse_call(self, args[0], args[1], nargs == 3 ? args[2] : Py_None, &c))
        return NULL;
    rk_decision decision;
    rk_status status = check_hash(self, c.subject, c.now_ns, c.units, spend, &decision);
    self->table->waited = false;
    if (status == RK_CAPACITY)
        return raise_capacity(self, args[1], decision.speaker);
    if (is_refusal(status))
        rk_note_refused(self->table->table, c.subject, status);
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    return rk_make_decision(self->limits, self->rule, &decision);
}

static PyObject *counter_check(counter_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    return decide(self, args, nargs, true);
}

static PyObject *counter_peek(counter_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    return decide(self, args, nargs, false);
}

/* The time of a charge: None if it is not known. One outside of the range is clamped. */
static bool parse_charged(PyObject *value, int64_t *charged_ns)
{
    *charged_ns = RK_NO_TIME;
    if (value == Py_None)
        return true;
    int overflow;
    *charged_ns = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (*charged_ns == -1 && !overflow && PyErr_Occurred())
        return false;
    if (overflow)
        *charged_ns = overflow > 0 ? RK_NOW_NS_MAX : RK_NOW_NS_MIN;
    *charged_ns = rk_time_in_range(*charged_ns);
    return true;
}

static PyObject *apply(counter_object *self, rk_change *c)
{
    rk_status status;
    do {
        status = rk_apply(self->table->table, c);
    } while (try_again(self, c->subject, &status));
    if (is_refusal(status) && c->verb != RK_REFUND)
        rk_note_refused(self->table->table, c->subject, status);
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    if (c->verb == RK_OWE || c->verb == RK_OWED)
        return PyLong_FromLongLong(c->found);
    Py_RETURN_NONE;
}

static PyObject *counter_refund(counter_object *self, PyObject *args)
{
    PyObject *subject, *units, *charged, *now = Py_None;
    rk_change c = {.verb = RK_REFUND};
    if (!PyArg_ParseTuple(args, "UOO|O", &subject, &units, &charged, &now) ||
        !parse_charged(charged, &c.time_ns) || !parse_call(self, subject, units, now, &c))
        return NULL;
    return apply(self, &c);
}

static PyObject *counter_owe(counter_object *self, PyObject *args)
{
    PyObject *subject, *units, *now = Py_None;
    rk_change c = {.verb = RK_OWE};
    if (!PyArg_ParseTuple(args, "UO|O", &subject, &units, &now) ||
        !parse_call(self, subject, units, now, &c))
        return NULL;
    return apply(self, &c);
}

static PyObject *counter_owed(counter_object *self, PyObject *args)
{
    PyObject *subject, *now = Py_None;
    rk_change c = {.verb = RK_OWED};
    if (!PyArg_ParseTuple(args, "U|O", &subject, &now) || !parse_call(self, subject, NULL, now, &c))
        return NULL;
    return apply(self, &c);
}

static PyObject *counter_grant(counter_object *self, PyObject *args)
{
    PyObject *subject, *units, *ttl, *now = Py_None;
    rk_change c = {.verb = RK_GRANT};
    if (!PyArg_ParseTuple(args, "UOO|O", &subject, &units, &ttl, &now))
        return NULL;
    c.time_ns = ttl == Py_None ? -1 : PyLong_AsLongLong(ttl);
    if (PyErr_Occurred() || !parse_call(self, subject, units, now, &c))
        return NULL;
    c.units = c.units > RK_UNITS_MAX ? RK_UNITS_MAX : c.units;
    return apply(self, &c);
}

static PyObject *counter_reset(counter_object *self, PyObject *subject)
{
    rk_change c = {.verb = RK_RESET};
    if (!parse_call(self, subject, NULL, Py_None, &c))
        return NULL;
    return apply(self, &c);
}

/* Make a FastCheck; None if the time comes from another clock than the kernel's. */
static PyObject *counter_fast_check(counter_object *self, PyObject *slow)
{
    if (self->table->now != NULL && !self->table->is_real)
        Py_RETURN_NONE;
    for (int i = 0; i < self->count; i++)
        if (self->numbers[i].algorithm == RK_IN_FLIGHT) /* each request has a counter of its own */
            Py_RETURN_NONE;
    counter_object *fast = (counter_object *)fast_check_type.tp_alloc(&fast_check_type, 0);
    if (fast == NULL)
        return NULL;
    fast->table = (rk_table_object *)Py_NewRef(self->table);
    fast->limits = Py_NewRef(self->limits);
    fast->rule = Py_NewRef(self->rule);
    fast->slow = Py_NewRef(slow);
    fast->count = self->count;
    memcpy(fast->numbers, self->numbers, sizeof fast->numbers);
    return (PyObject *)fast;
}

/* Make the counter of one request, which has a stamp. */
static PyObject *counter_stamped(counter_object *self, PyObject *stamp)
{
    long long number = PyLong_AsLongLong(stamp);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    counter_object *own = (counter_object *)rk_counter_type.tp_alloc(&rk_counter_type, 0);
    if (own == NULL)
        return NULL;
    own->table = (rk_table_object *)Py_NewRef(self->table);
    own->limits = Py_NewRef(self->limits);
    own->rule = Py_NewRef(self->rule);
    own->count = self->count;
    own->stamp = number;
    memcpy(own->numbers, self->numbers, sizeof own->numbers);
    for (int i = 0; i < own->count; i++)
        own->numbers[i].stamp = number;
    return (PyObject *)own;
}

static PyObject *fast_check_counted(counter_object *self, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("(LL)", (long long)self->allowed, (long long)self->denied);
}

static PyMethodDef counter_methods[] = {
    {"check", (PyCFunction)(void (*)(void))counter_check, METH_FASTCALL,
     "check($self, subject, cost, now_ns=None, /)\n--\n\nSee decide.store.Counter.check."},
    {"peek", (PyCFunction)(void (*)(void))counter_peek, METH_FASTCALL,
     "peek($self, subject, cost, now_ns=None, /)\n--\n\nSee decide.store.Counter.peek."},
    {"refund", (PyCFunction)counter_refund, METH_VARARGS,
     "refund($self, subject, units, charged_ns, now_ns=None, /)\n--\n\nReturn units."},
    {"owe", (PyCFunction)counter_owe, METH_VARARGS,
     "owe($self, subject, units, now_ns=None, /)\n--\n\nCharge in full; return what was forgiven."},
    {"owed", (PyCFunction)counter_owed, METH_VARARGS,
     "owed($self, subject, now_ns=None, /)\n--\n\nReturn the units that are owed."},
    {"grant", (PyCFunction)counter_grant, METH_VARARGS,
     "grant($self, subject, units, ttl_ns, now_ns=None, /)\n--\n\nAdd extra units."},
    {"reset", (PyCFunction)counter_reset, METH_O, "Forget a subject."},
    {"stamped", (PyCFunction)counter_stamped, METH_O, "See decide.store.Counter.stamped."},
    {"fast_check", (PyCFunction)counter_fast_check, METH_O, "See decide.store.Counter.fast_check."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef counter_members[] = {
    {"limits", T_OBJECT, offsetof(counter_object, limits), READONLY, "The limits, in order."},
    {"stamp", T_LONGLONG, offsetof(counter_object, stamp), READONLY, "See decide.store.Counter."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject rk_counter_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.Counter",
    .tp_doc = "One rule's limits on one table.",
    .tp_basicsize = sizeof(counter_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = counter_new,
    .tp_dealloc = (destructor)counter_dealloc,
    .tp_traverse = (traverseproc)counter_traverse,
    .tp_clear = (inquiry)counter_clear,
    .tp_methods = counter_methods,
    .tp_members = counter_members,
};

static PyMethodDef fast_check_methods[] = {
    {"check", (PyCFunction)(void (*)(void))fast_check_check, METH_FASTCALL | METH_KEYWORDS,
     "check($self, key, cost=1)\n--\n\nSpend cost units if every limit has room."},
    {"counted", (PyCFunction)fast_check_counted, METH_NOARGS,
     "How many calls `check` has allowed and denied itself."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject fast_check_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.FastCheck",
    .tp_doc = "A counter's check with a plain key.",
    .tp_basicsize = sizeof(counter_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)counter_dealloc,
    .tp_traverse = (traverseproc)counter_traverse,
    .tp_clear = (inquiry)counter_clear,
    .tp_methods = fast_check_methods,
};

/* ---- several charges ---- */

/* The charges of one call of check_all. */
typedef struct {
    rk_table_object *table;
    PyObject *checks, *optional;
    rk_charge *charges;
    int count;
    int64_t now_ns;
} charging;

static PyObject *check_at(const charging *c, int at) { return PyTuple_GET_ITEM(c->checks, at); }

static counter_object *counter_at(const charging *c, int at)
{
    return (counter_object *)PyTuple_GET_ITEM(check_at(c, at), 0);
}

static bool parse_check(charging *c, int at)
{
    PyObject *check = check_at(c, at);
    if (!PyTuple_Check(check) || PyTuple_GET_SIZE(check) != 3 ||
        !Py_IS_TYPE(PyTuple_GET_ITEM(check, 0), &rk_counter_type) ||
        counter_at(c, at)->table != c->table || !PyUnicode_Check(PyTuple_GET_ITEM(check, 1))) {
        PyErr_SetString(PyExc_TypeError,
                        "a check is a counter of this table, a subject and a cost");
        return false;
    }
    counter_object *counter = counter_at(c, at);
    c->charges[at] =
        (rk_charge){.limits = counter->numbers, .count = counter->count, .status = RK_OK};
    return parse_units(PyTuple_GET_ITEM(check, 2), &c->charges[at].cost);
}

static bool parse_checks(charging *c, PyObject *now)
{
    for (int i = 0; i < c->count; i++)
        if (!parse_check(c, i))
            return false;
    /* Last, because the conversions may have run any code, including close(). */
    if (!rk_table_is_open(c->table) || !rk_parse_now(c->table, now, &c->now_ns) ||
        !rk_table_is_open(c->table))
        return false;
    for (int i = 0; i < c->count; i++) {
        Py_ssize_t length;
        const char *bytes = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(check_at(c, i), 1), &length);
        if (bytes == NULL)
            return false;
        c->charges[i].subject = hash_of(counter_at(c, i), bytes, length);
    }
    return true;
}

/* Return 1 if the other charges may be made without the one at `at`; -1 with an exception. */
static int is_optional(const charging *c, int at)
{
    PyObject *position = c->optional == NULL ? NULL : PyLong_FromLong(at);
    int found = position ? PySequence_Contains(c->optional, position) : c->optional ? -1 : 0;
    Py_XDECREF(position);
    return found;
}

/* Charge all, without those that fail and are optional. Return false with an exception. */
static bool charge(const charging *c, rk_status *status, int *at)
{
    const rk_table *table = c->table->table;
    for (bool spend = true;;) {
        *status = rk_check_all(c->table->table, c->charges, c->count, c->now_ns, spend, at);
        if (*status == RK_BUSY) {
            if (rk_try_again(c->table, rk_wait, c->charges[*at].subject, status))
                continue;
            if (*status != RK_BUSY)
                return true;
            c->charges[*at].status = RK_BUSY; /* the others can be decided */
        } else if (*status != RK_OK || *at < 0 || !spend) {
            return true;
        }
        int optional = spend ? is_optional(c, *at) : 0;
        if (optional < 0)
            return false;
        if (*status == RK_OK && !optional)
            return true; /* they have been decided */
        spend = spend && optional;
        if (c->table->table != table || c->table->closing) { /* `optional` may run any code */
            *status = RK_LOST;
            return true;
        }
    }
}

/* Return the exception that was raised, if it is a StoreError; otherwise NULL, and it stays. */
static PyObject *store_error(void)
{
    PyObject *type, *value, *traceback;
    if (!PyErr_ExceptionMatches(error_store))
        return NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* Note the charges without room. */
static void note_charges(const charging *c)
{
    for (int i = 0; i < c->count; i++)
        if (is_refusal(c->charges[i].status))
            rk_note_refused(c->table->table, c->charges[i].subject, c->charges[i].status);
}

static PyObject *answer_at(const charging *c, int at)
{
    const rk_charge *charge = &c->charges[at];
    if (charge->status == RK_OK)
        return rk_make_decision(counter_at(c, at)->limits, counter_at(c, at)->rule,
                                &charge->decision);
    rk_raise_status(c->table, charge->status);
    return store_error();
}

/* Return a list of answers; `failed` is that of all, if it is not NULL. */
static PyObject *answers(const charging *c, PyObject *failed)
{
    PyObject *list = PyList_New(c->count);
    for (int i = 0; list != NULL && i < c->count; i++) {
        PyObject *answer = failed ? Py_NewRef(failed) : answer_at(c, i);
        if (answer == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, answer);
    }
    return list;
}

static PyObject *check_parsed(charging *c, PyObject *now)
{
    rk_status status;
    int at;
    c->table->waited = false;
    bool decided = parse_checks(c, now) && charge(c, &status, &at);
    if (decided && status == RK_CAPACITY)
        return raise_capacity(counter_at(c, at), PyTuple_GET_ITEM(check_at(c, at), 2),
                              c->charges[at].decision.speaker);
    if (decided && status == RK_OK) {
        note_charges(c);
        return answers(c, NULL);
    }
    if (decided && status == RK_NO_MEMORY)
        PyErr_NoMemory();
    else if (decided)
        rk_raise_status(c->table, status);
    PyObject *failed = store_error();
    PyObject *list = failed ? answers(c, failed) : NULL;
    Py_XDECREF(failed);
    return list;
}

/* check_all(checks, optional=(), now_ns=None): see Store.check_together. */
static PyObject *table_check_all(rk_table_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { ON_STACK = 8 };
    rk_charge charges[ON_STACK];
    if (nargs < 1 || nargs > 3) {
        PyErr_SetString(PyExc_TypeError, "check_all(checks, optional=(), now_ns=None)");
        return NULL;
    }
    /* A tuple cannot change while another thread runs. */
    charging c = {.table = self,
                  .checks = PySequence_Tuple(args[0]),
                  .optional = nargs > 1 ? args[1] : NULL,
                  .charges = charges};
    Py_ssize_t count = c.checks ? PyTuple_GET_SIZE(c.checks) : 0;
    c.count = (int)count;
    PyObject *list = NULL;
    if (count > RK_CHARGES_MAX) {
        PyErr_Format(error_config, "%zd checks in one call are more than %d; make several calls",
                     count, RK_CHARGES_MAX);
    } else if (c.checks != NULL && count <= ON_STACK) {
        list = check_parsed(&c, nargs > 2 ? args[2] : Py_None);
    } else if (c.checks != NULL) {
        c.charges = PyMem_New(rk_charge, (size_t)count);
        list = c.charges ? check_parsed(&c, nargs > 2 ? args[2] : Py_None) : PyErr_NoMemory();
        PyMem_Free(c.charges);
    }
    Py_XDECREF(c.checks);
    return list;
}

/* ---- the module ---- */

static PyObject *set_switches(PyObject *module, PyObject *args)
{
    (void)module;
    int limiting_off;
    if (!PyArg_ParseTuple(args, "pp", &clock_replaced, &limiting_off))
        return NULL;
    bypass = clock_replaced || limiting_off;
    Py_RETURN_NONE;
}

/* examine(path, capacity, log_bytes, mode): the statistics of a file, and its damage, which is
 * usually empty. */
static PyObject *examine(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *path;
    unsigned long long capacity, log_bytes;
    rk_options options = {.path = NULL};
    if (!PyArg_ParseTuple(args, "O&KKI", PyUnicode_FSConverter, &path, &capacity, &log_bytes,
                          &options.mode))
        return NULL;
    options.path = PyBytes_AS_STRING(path);
    options.capacity = capacity;
    options.log_bytes = log_bytes;
    rk_stats stats;
    char error[RK_ERROR_BYTES];
    rk_status status;
    Py_BEGIN_ALLOW_THREADS status = rk_examine(&options, &stats, error);
    Py_END_ALLOW_THREADS Py_DECREF(path);
    PyObject *text = PyUnicode_DecodeFSDefault(error);
    if (text != NULL && status != RK_OK && status != RK_DAMAGED) {
        PyErr_SetObject(status == RK_MISMATCH ? error_config : rk_error_unavailable, text);
        Py_CLEAR(text);
    }
    return text == NULL ? NULL : Py_BuildValue("(NN)", stats_dict(&stats), text);
}

static PyMethodDef module_methods[] = {
    {"examine", examine, METH_VARARGS, "Return the statistics of a file, and its damage."},
    {"set_switches", set_switches, METH_VARARGS,
     "set_switches(clock_replaced, limiting_off): send every check through the Python path."},
    {NULL, NULL, 0, NULL},
};

static int add_contents(PyObject *module);

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, add_contents},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ratekeeper.decide.kernel._kernel",
    .m_doc = "The table of quotas in C.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

static bool import_names(const char *module_name, const char *const *names, PyObject ***places)
{
    PyObject *module = PyImport_ImportModule(module_name);
    for (int i = 0; module != NULL && names[i] != NULL; i++)
        if ((*places[i] = PyObject_GetAttrString(module, names[i])) == NULL)
            Py_CLEAR(module);
    Py_XDECREF(module);
    return module != NULL;
}

static int add_contents(PyObject *module)
{
    /* Types and exceptions are static, those of the main interpreter. Interpreters that share the
     * GIL, such as those of mod_wsgi, do not look at the slot that says so. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "the C kernel runs in the main interpreter only");
        return -1;
    }
    static const char *const errors[] = {
        "CapacityError", "StoreFull", "StoreTimeout", "StoreUnavailable", "ConfigError",
        "StoreError",    NULL};
    static PyObject **error_places[] = {&error_capacity,       &error_full,   &error_timeout,
                                        &rk_error_unavailable, &error_config, &error_store};
    static const char *const models[] = {"decision_repr", "decision_fields", "Decision",
                                         "seconds_from_ns", NULL};
    static PyObject **model_places[] = {&decision_repr, &decision_fields, &python_decision,
                                        &seconds_from_ns};
    if (!import_names("ratekeeper.core.errors", errors, error_places) ||
        !import_names("ratekeeper.core.model", models, model_places))
        return -1;
    if (PyType_Ready(&decision_type) < 0 || PyType_Ready(&rk_table_type) < 0 ||
        PyType_Ready(&rk_counter_type) < 0 || PyType_Ready(&fast_check_type) < 0 ||
        PyType_Ready(&rk_counted_type) < 0 || PyType_Ready(&rk_request_check_type) < 0 ||
        PyType_Ready(&rk_allowances_type) < 0 || PyType_Ready(&rk_allowance_gate_type) < 0)
        return -1;
    if (PyModule_AddObjectRef(module, "Decision", (PyObject *)&decision_type) < 0 ||
        PyModule_AddObjectRef(module, "Table", (PyObject *)&rk_table_type) < 0 ||
        PyModule_AddObjectRef(module, "Counter", (PyObject *)&rk_counter_type) < 0 ||
        PyModule_AddObjectRef(module, "FastCheck", (PyObject *)&fast_check_type) < 0 ||
        PyModule_AddObjectRef(module, "Counted", (PyObject *)&rk_counted_type) < 0 ||
        PyModule_AddObjectRef(module, "RequestCheck", (PyObject *)&rk_request_check_type) < 0 ||
        PyModule_AddObjectRef(module, "Allowances", (PyObject *)&rk_allowances_type) < 0 ||
        PyModule_AddObjectRef(module, "AllowanceGate", (PyObject *)&rk_allowance_gate_type) < 0)
        return -1;
    return 0;
}

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&module_definition); }
