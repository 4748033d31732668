/* The check of a request by its rules, in one call. Everything that is the same for all requests of
 * one shape is prepared: each rule's counter, the field that it counts by, the units. A check reads
 * the fields, decides and charges, combines the decisions and counts them. If anything about a
 * request is not ordinary, or the table cannot decide, it returns None and nothing is charged: the
 * Python path (`limiter/path.py`) makes the same check again, explains and applies the failure
 * policy. */
#include "module.h"

#include <string.h>

enum { RULES_MAX = 8, PREFIX_MAX = 64, SUBJECT_MAX = 512, SEPARATOR = 0x1f };

/* One check in so many is sampled; see metrics/tally.py. The interpreter's lock protects it. */
enum { SAMPLE_EVERY = 61 };
static int sample_in = SAMPLE_EVERY;

/* ---- Counted ---- */

/* How many checks were allowed and denied. The interpreter's lock protects both. */
typedef struct {
    PyObject_HEAD long long allowed, denied;
} counted_object;

static PyMemberDef counted_members[] = {
    {"allowed", T_LONGLONG, offsetof(counted_object, allowed), READONLY, "Allowed checks."},
    {"denied", T_LONGLONG, offsetof(counted_object, denied), READONLY, "Denied checks."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject rk_counted_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.Counted",
    .tp_doc = "How many checks a RequestCheck has allowed and denied.",
    .tp_basicsize = sizeof(counted_object),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_members = counted_members,
};

static void count(counted_object *counted, bool allowed)
{
    if (allowed)
        counted->allowed++;
    else
        counted->denied++;
}

/* ---- RequestCheck ---- */

typedef struct {
    rk_counter_object *counter;
    PyObject *field;
    counted_object *counted;
    int64_t units;
    size_t prefix_length;
    char prefix[PREFIX_MAX]; /* of the subject: the field and a colon */
} rule;

typedef struct {
    PyObject_HEAD rk_table_object *table;
    counted_object *counted;  /* of requests */
    PyObject *owner, *sample; /* see _kernel.pyi */
    int count;
    rule rules[RULES_MAX];
} request_check;

static bool read_rule(request_check *self, PyObject *given, rule *into)
{
    PyObject *counter, *field, *counted;
    long long units;
    if (!PyArg_ParseTuple(given, "O!ULO!", &rk_counter_type, &counter, &field, &units,
                          &rk_counted_type, &counted))
        return false;
    Py_ssize_t length;
    const char *name = PyUnicode_AsUTF8AndSize(field, &length);
    if (name == NULL)
        return false;
    if (length + 1 > PREFIX_MAX || units < 0 || units > RK_UNITS_MAX) {
        PyErr_SetString(PyExc_ValueError, "the field or the units of a rule are too long");
        return false;
    }
    into->counter = (rk_counter_object *)Py_NewRef(counter);
    into->field = Py_NewRef(field);
    into->counted = (counted_object *)Py_NewRef(counted);
    into->units = units;
    memcpy(into->prefix, name, (size_t)length);
    into->prefix[length] = ':';
    into->prefix_length = (size_t)length + 1;
    self->count++;
    if (into->counter->table != self->table) {
        PyErr_SetString(PyExc_ValueError, "the counters are of several tables");
        return false;
    }
    return true;
}

static PyObject *request_check_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"table", "rules", "counted", "owner", "sample", NULL};
    PyObject *table, *rules, *counted, *owner, *sample;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!OO", names, &rk_table_type, &table,
                                     &PyTuple_Type, &rules, &rk_counted_type, &counted, &owner,
                                     &sample))
        return NULL;
    Py_ssize_t given = PyTuple_GET_SIZE(rules);
    if (given < 1 || given > RULES_MAX) {
        PyErr_Format(PyExc_ValueError, "a request has 1 to %d rules here, not %zd", RULES_MAX,
                     given);
        return NULL;
    }
    request_check *self = (request_check *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->table = (rk_table_object *)Py_NewRef(table);
    self->counted = (counted_object *)Py_NewRef(counted);
    self->owner = Py_NewRef(owner);
    self->sample = Py_NewRef(sample);
    for (Py_ssize_t i = 0; i < given; i++)
        if (!read_rule(self, PyTuple_GET_ITEM(rules, i), &self->rules[i])) {
            Py_DECREF(self);
            return NULL;
        }
    return (PyObject *)self;
}

static int request_check_traverse(request_check *self, visitproc visit, void *arg)
{
    Py_VISIT(self->table);
    Py_VISIT(self->owner);
    Py_VISIT(self->sample);
    for (int i = 0; i < self->count; i++)
        Py_VISIT(self->rules[i].counter);
    return 0;
}

static int request_check_clear(request_check *self)
{
    Py_CLEAR(self->owner);
    Py_CLEAR(self->sample);
    return 0;
}

static void request_check_dealloc(request_check *self)
{
    PyObject_GC_UnTrack(self);
    request_check_clear(self);
    for (int i = 0; i < self->count; i++) {
        Py_DECREF(self->rules[i].counter);
        Py_DECREF(self->rules[i].field);
        Py_DECREF(self->rules[i].counted);
    }
    Py_XDECREF(self->counted);
    Py_XDECREF(self->table);
    Py_TYPE(self)->tp_free(self);
}

/* Write the subject that a rule counts the request under; return its length, or 0 if the value of
 * the field is not a short ASCII text without the separator. */
static size_t write_subject(const rule *rule, PyObject *value, char subject[SUBJECT_MAX])
{
    if (!PyUnicode_CheckExact(value) || !PyUnicode_IS_COMPACT_ASCII(value))
        return 0;
    size_t length = (size_t)PyUnicode_GET_LENGTH(value);
    const char *bytes = (const char *)PyUnicode_1BYTE_DATA(value);
    if (rule->prefix_length + length > SUBJECT_MAX || memchr(bytes, SEPARATOR, length) != NULL)
        return 0;
    memcpy(subject, rule->prefix, rule->prefix_length);
    memcpy(subject + rule->prefix_length, bytes, length);
    return rule->prefix_length + length;
}

/* Fill in the charges; return false if one is not plain. Reading a field may run any code. */
static bool read_charges(const request_check *self, PyObject *request, rk_charge *charges,
                         PyObject **values)
{
    for (int i = 0; i < self->count; i++)
        if ((values[i] = PyObject_GetAttr(request, self->rules[i].field)) == NULL)
            return false;
    if (self->table->table == NULL || self->table->closing)
        return false;
    for (int i = 0; i < self->count; i++) {
        const rule *rule = &self->rules[i];
        const rk_counter_object *counter = rule->counter;
        char subject[SUBJECT_MAX];
        size_t length = write_subject(rule, values[i], subject);
        if (length == 0)
            return false;
        rk_hash hash = rk_subject_hash(self->table->table, subject, length);
        charges[i] = (rk_charge){.subject = rk_group_hash(hash, counter->numbers[0].rule),
                                 .limits = counter->numbers,
                                 .count = counter->count,
                                 .cost = rule->units,
                                 .status = RK_OK};
    }
    return true;
}

/* Decide and charge; return whether the table has decided. */
static bool decide_all(const request_check *self, rk_charge *charges, int64_t now_ns)
{
    rk_table *table = self->table->table;
    int failed = -1;
    if (self->count > 1)
        return rk_check_all(table, charges, self->count, now_ns, true, &failed) == RK_OK &&
               failed < 0;
    rk_charge *only = &charges[0];
    return rk_check(table, only->subject, only->limits, only->count, now_ns, only->cost, true,
                    &only->decision) == RK_OK;
}

/* As `_tightness` in decide/combine.py. */
static bool is_tighter(const rk_decision *a, const rk_decision *b)
{
    if (a->allowed != b->allowed)
        return !a->allowed;
    if (a->remaining != b->remaining)
        return a->remaining < b->remaining;
    if (a->retry_after_ns != b->retry_after_ns)
        return a->retry_after_ns > b->retry_after_ns;
    return a->reset_after_ns > b->reset_after_ns;
}

/* As `combine_decisions` in decide/combine.py; return the position of the tightest rule. */
static int combine(const request_check *self, const rk_charge *charges, rk_decision *combined)
{
    int tightest = 0;
    int64_t delay_ns = 0, retry_ns = 0, charged_ns = RK_NO_TIME;
    for (int i = 0; i < self->count; i++) {
        const rk_decision *each = &charges[i].decision;
        if (is_tighter(each, &charges[tightest].decision))
            tightest = i;
        if (each->delay_ns > delay_ns)
            delay_ns = each->delay_ns;
        if (each->retry_after_ns > retry_ns)
            retry_ns = each->retry_after_ns;
        if (charged_ns == RK_NO_TIME)
            charged_ns = each->charged_ns;
    }
    *combined = charges[tightest].decision;
    combined->delay_ns = combined->allowed ? delay_ns : 0;
    combined->retry_after_ns = combined->allowed ? 0 : retry_ns;
    if (combined->allowed && combined->charged_ns == RK_NO_TIME)
        combined->charged_ns = charged_ns;
    return tightest;
}

/* The time of each rule's charge, or None. */
static PyObject *times_of(const request_check *self, const rk_charge *charges)
{
    PyObject *times = PyTuple_New(self->count);
    for (int i = 0; times != NULL && i < self->count; i++) {
        int64_t charged_ns = charges[i].decision.charged_ns;
        PyObject *time =
            charged_ns == RK_NO_TIME ? Py_NewRef(Py_None) : PyLong_FromLongLong(charged_ns);
        if (time == NULL)
            Py_CLEAR(times);
        else
            PyTuple_SET_ITEM(times, i, time);
    }
    return times;
}

/* The ids of the rules that denied, if there are several; otherwise None. */
static PyObject *deniers_of(const request_check *self, const rk_charge *charges)
{
    int count = 0;
    for (int i = 0; i < self->count; i++)
        count += !charges[i].decision.allowed;
    if (count < 2)
        return Py_NewRef(Py_None);
    PyObject *ids = PyTuple_New(count);
    for (int i = 0, at = 0; ids != NULL && i < self->count; i++)
        if (!charges[i].decision.allowed)
            PyTuple_SET_ITEM(ids, at++, Py_NewRef(self->rules[i].counter->rule));
    return ids;
}

/* See Decision.source. */
static PyObject *source_of(request_check *self, PyObject *request, const rk_charge *charges,
                           bool allowed)
{
    if (!allowed)
        return deniers_of(self, charges);
    if (self->count == 1)
        return PyTuple_Pack(2, (PyObject *)self, request);
    PyObject *times = times_of(self, charges);
    PyObject *source = times ? PyTuple_Pack(3, (PyObject *)self, request, times) : NULL;
    Py_XDECREF(times);
    return source;
}

/* Pass on the subjects of one check in SAMPLE_EVERY. */
static void sample(const request_check *self, PyObject *const *values)
{
    if (--sample_in > 0)
        return;
    sample_in = SAMPLE_EVERY;
    PyObject *subjects = PyTuple_New(self->count);
    for (int i = 0; subjects != NULL && i < self->count; i++) {
        PyObject *subject = PyUnicode_FromFormat("%U:%U", self->rules[i].field, values[i]);
        if (subject == NULL)
            Py_CLEAR(subjects);
        else
            PyTuple_SET_ITEM(subjects, i, subject);
    }
    PyObject *done = subjects ? PyObject_CallOneArg(self->sample, subjects) : NULL;
    if (done == NULL)
        PyErr_WriteUnraisable(self->sample);
    Py_XDECREF(done);
    Py_XDECREF(subjects);
}

static PyObject *decision_of(request_check *self, PyObject *request, const rk_charge *charges)
{
    rk_decision combined;
    int tightest = combine(self, charges, &combined);
    const rk_counter_object *counter = self->rules[tightest].counter;
    PyObject *decision = rk_make_decision(counter->limits, counter->rule, &combined);
    PyObject *source = decision ? source_of(self, request, charges, combined.allowed) : NULL;
    if (source == NULL) {
        Py_XDECREF(decision);
        return NULL;
    }
    rk_set_source(decision, source);
    for (int i = 0; i < self->count; i++)
        count(self->rules[i].counted, charges[i].decision.allowed);
    count(self->counted, combined.allowed);
    return decision;
}

/* check(request): the decision, or None if the Python path has to decide. */
static PyObject *request_check_check(request_check *self, PyObject *request)
{
    rk_charge charges[RULES_MAX];
    PyObject *values[RULES_MAX] = {NULL};
    int64_t now_ns;
    PyObject *decision = NULL;
    if (read_charges(self, request, charges, values) &&
        rk_parse_now(self->table, Py_None, &now_ns) && self->table->table != NULL &&
        decide_all(self, charges, now_ns)) {
        decision = decision_of(self, request, charges);
        if (decision != NULL && self->sample != NULL)
            sample(self, values);
    }
    for (int i = 0; i < self->count; i++)
        Py_XDECREF(values[i]);
    if (decision != NULL || PyErr_Occurred())
        return decision;
    Py_RETURN_NONE;
}

static PyMethodDef request_check_methods[] = {
    {"check", (PyCFunction)request_check_check, METH_O,
     "check($self, request, /)\n--\n\nCharge a request by all of its rules, or by none."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef request_check_members[] = {
    {"owner", T_OBJECT, offsetof(request_check, owner), READONLY, "What it was made for."},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject rk_request_check_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.RequestCheck",
    .tp_doc = "The check of requests that the same rules count by the same fields.",
    .tp_basicsize = sizeof(request_check),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = request_check_new,
    .tp_dealloc = (destructor)request_check_dealloc,
    .tp_traverse = (traverseproc)request_check_traverse,
    .tp_clear = (inquiry)request_check_clear,
    .tp_methods = request_check_methods,
    .tp_members = request_check_members,
};
