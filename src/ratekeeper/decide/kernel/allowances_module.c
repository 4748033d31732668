/* The binding of the table of allowances for Python. A check takes the compiled path only if
 * everything about it is ordinary and the node has units for it, or a denial; otherwise it calls
 * the Python path (`slow`), which asks the authority. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

#include "allowances.h"

/* ---- Allowances ---- */

typedef struct {
    rk_table_object table;
    uint64_t *numbers; /* of the gates that were prepared here, in order */
    size_t count, room;
} allowances_object;

static bool add_number(allowances_object *self, uint64_t number)
{
    size_t at = 0;
    while (at < self->count && self->numbers[at] < number)
        at++;
    if (at < self->count && self->numbers[at] == number)
        return true;
    if (self->count == self->room) {
        size_t room = self->room ? 2 * self->room : 16;
        uint64_t *grown = PyMem_Realloc(self->numbers, room * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return false;
        }
        self->numbers = grown;
        self->room = room;
    }
    memmove(&self->numbers[at + 1], &self->numbers[at], (self->count - at) * sizeof(uint64_t));
    self->numbers[at] = number;
    self->count++;
    return true;
}

static void allowances_dealloc(allowances_object *self)
{
    PyMem_Free(self->numbers);
    rk_table_dealloc(&self->table);
}

static PyObject *claim_as_tuple(const rk_claim *claim)
{
    PyObject *subject = PyUnicode_DecodeUTF8(claim->subject, claim->length, "replace");
    if (subject == NULL)
        return NULL;
    return Py_BuildValue("(KsNLLLL)", claim->number, claim->leased ? "leased" : "eventual", subject,
                         (long long)claim->units, (long long)claim->ends_store_ns,
                         (long long)claim->age_ns, (long long)claim->token);
}

static PyObject *claims_as_list(const rk_claim *claims, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = claim_as_tuple(&claims[i]);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

/* With the interpreter's lock released, other threads may prepare gates: a copy is used. */
static PyObject *claim_with(allowances_object *self, rk_claiming *claiming, Py_ssize_t most)
{
    rk_table_object *table = &self->table;
    uint64_t *numbers = PyMem_Malloc((self->count + 1) * sizeof *numbers);
    rk_claim *claims = PyMem_Malloc((size_t)(most ? most : 1) * sizeof *claims);
    size_t count = 0;
    PyObject *list = NULL;
    if (numbers == NULL || claims == NULL) {
        PyErr_NoMemory();
    } else {
        if (self->count > 0)
            memcpy(numbers, self->numbers, self->count * sizeof *numbers);
        claiming->numbers = numbers;
        claiming->numbers_count = self->count;
        PyThreadState *thread = rk_is_shared(table->table) ? rk_leave(table) : NULL;
        rk_status status = rk_claim_units(table->table, claiming, claims, (size_t)most, &count);
        if (thread != NULL)
            rk_back(table, thread);
        list = status == RK_OK ? claims_as_list(claims, count) : rk_raise_status(table, status);
    }
    PyMem_Free(numbers);
    PyMem_Free(claims);
    return list;
}

enum { CLAIMS_MAX = 100000 };

static PyObject *allowances_claim(allowances_object *self, PyObject *args)
{
    Py_ssize_t most;
    long long flush_ns;
    int ending;
    PyObject *now;
    rk_claiming claiming = {.now_ns = 0};
    if (!PyArg_ParseTuple(args, "nLpO", &most, &flush_ns, &ending, &now) ||
        !rk_table_is_open(&self->table) || !rk_parse_now(&self->table, now, &claiming.now_ns) ||
        !rk_table_is_open(&self->table)) /* again: reading `now` may have run any code */
        return NULL;
    claiming.flush_ns = flush_ns;
    claiming.ending = ending;
    return claim_with(self, &claiming, most < 0 ? 0 : most < CLAIMS_MAX ? most : CLAIMS_MAX);
}

/* Fill in the hash of a subject for the table that is open now. */
static bool read_subject(rk_table_object *table, PyObject *text, rk_subject *subject)
{
    Py_ssize_t length;
    subject->bytes = PyUnicode_AsUTF8AndSize(text, &length);
    if (subject->bytes == NULL || !rk_table_is_open(table))
        return false;
    subject->length = (size_t)length;
    subject->hash = rk_subject_hash(table->table, subject->bytes, subject->length);
    return true;
}

static PyObject *allowances_confirm(allowances_object *self, PyObject *args)
{
    unsigned long long number;
    long long token;
    PyObject *text;
    rk_subject subject;
    rk_status status;
    if (!PyArg_ParseTuple(args, "KUL", &number, &text, &token) ||
        !read_subject(&self->table, text, &subject))
        return NULL;
    do
        status = rk_confirm(self->table.table, number, &subject, token);
    while (rk_try_again(&self->table, rk_wait_for_allowance, subject.hash, &status));
    if (status != RK_OK)
        return rk_raise_status(&self->table, status);
    Py_RETURN_NONE;
}

static PyObject *allowances_stats(allowances_object *self, PyObject *unused)
{
    (void)unused;
    rk_allowance_stats stats;
    rk_table_object *table = &self->table;
    if (!rk_table_is_open(table))
        return NULL;
    rk_now_ns(table->table); /* examines the file */
    PyThreadState *thread = rk_is_shared(table->table) ? rk_leave(table) : NULL;
    rk_status status = rk_read_allowance_stats(table->table, &stats);
    if (thread != NULL)
        rk_back(table, thread);
    if (status != RK_OK)
        return rk_raise_status(table, status);
    return Py_BuildValue("(KKKKK)", stats.held, stats.held_max, stats.leased_units,
                         stats.pending_units, stats.refused);
}

static PyMethodDef allowances_methods[] = {
    {"close", (PyCFunction)rk_table_close, METH_NOARGS, "Unmap the memory."},
    {"reopen", (PyCFunction)rk_table_reopen, METH_NOARGS,
     "Open a lost file again; return why it was created again, or an empty text."},
    {"now_ns", (PyCFunction)rk_table_now_ns, METH_NOARGS, "Return the table's time."},
    {"claim", (PyCFunction)allowances_claim, METH_VARARGS,
     "claim(count, flush_ns, ending, now_ns)"},
    {"confirm", (PyCFunction)allowances_confirm, METH_VARARGS, "confirm(gate, subject, token)"},
    {"stats", (PyCFunction)allowances_stats, METH_NOARGS, "Return the table's numbers."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject rk_allowances_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.Allowances",
    .tp_doc = "A node's allowances in one block of memory, of this process or of a file.",
    .tp_basicsize = sizeof(allowances_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = rk_table_new,
    .tp_dealloc = (destructor)allowances_dealloc,
    .tp_traverse = (traverseproc)rk_table_traverse,
    .tp_clear = (inquiry)rk_table_clear,
    .tp_methods = allowances_methods,
    .tp_members = rk_table_members,
};

/* ---- AllowanceGate ---- */

typedef struct {
    PyObject_HEAD rk_table_object *table;
    PyObject *limits, *rule, *slow;
    int64_t allowed, denied; /* the interpreter's lock protects them */
    rk_allowance_gate gate;
} gate_object;

static PyObject *gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"table",       "number",   "limits", "rule", "leased",
                            "lifetime_ns", "capacity", "slow",   NULL};
    PyObject *table, *limits, *rule, *slow = Py_None;
    unsigned long long number;
    long long lifetime_ns, capacity;
    int leased;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!KO!UpLL|O", names, &rk_allowances_type,
                                     &table, &number, &PyTuple_Type, &limits, &rule, &leased,
                                     &lifetime_ns, &capacity, &slow))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(limits);
    if (count < 1 || count > RK_LIMITS_MAX || lifetime_ns < 0) {
        PyErr_Format(PyExc_ValueError, "a gate has 1 to %d limits, not %zd, and a lifetime",
                     RK_LIMITS_MAX, count);
        return NULL;
    }
    if (!rk_table_is_open((rk_table_object *)table) ||
        !add_number((allowances_object *)table, number))
        return NULL;
    gate_object *self = (gate_object *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->table = (rk_table_object *)Py_NewRef(table);
    self->limits = Py_NewRef(limits);
    self->rule = Py_NewRef(rule);
    self->slow = Py_NewRef(slow);
    self->gate = (rk_allowance_gate){.number = number,
                                     .lifetime_ns = lifetime_ns,
                                     .capacity = capacity,
                                     .limits = (int)count,
                                     .leased = leased != 0};
    return (PyObject *)self;
}

static int gate_traverse(gate_object *self, visitproc visit, void *arg)
{
    Py_VISIT(self->table);
    Py_VISIT(self->limits);
    Py_VISIT(self->rule);
    Py_VISIT(self->slow);
    return 0;
}

static int gate_clear(gate_object *self)
{
    Py_CLEAR(self->slow);
    return 0;
}

static void gate_dealloc(gate_object *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->table);
    Py_XDECREF(self->limits);
    Py_XDECREF(self->rule);
    Py_XDECREF(self->slow);
    Py_TYPE(self)->tp_free(self);
}

static bool try_again(gate_object *self, const rk_subject *subject, rk_status *status)
{
    return __builtin_expect(*status == RK_BUSY, 0) &&
           rk_try_again(self->table, rk_wait_for_allowance, subject->hash, status);
}

static PyObject *counted_decision(gate_object *self, const rk_decision *decision)
{
    if (decision->allowed)
        self->allowed++;
    else
        self->denied++;
    return rk_make_decision(self->limits, self->rule, decision);
}

/* check(key, cost=1), the fast path. A miss is part of the demand when the slow path spends. */
static PyObject *gate_check(gate_object *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames)
{
    int64_t cost;
    Py_ssize_t length;
    rk_subject subject = {
        .bytes = rk_plain_check(self->table, args, nargs, kwnames, &length, &cost),
    };
    if (subject.bytes != NULL) {
        rk_table *table = self->table->table;
        rk_decision decision;
        rk_status status;
        bool decided;
        subject.length = (size_t)length;
        subject.hash = rk_subject_hash(table, subject.bytes, subject.length);
        int64_t now_ns = rk_now_ns(table);
        do
            status =
                rk_spend(table, &self->gate, &subject, now_ns, cost, false, &decided, &decision);
        while (try_again(self, &subject, &status));
        if (status == RK_OK && decided)
            return counted_decision(self, &decision);
        self->table->waited = status == RK_BUSY;
    }
    if (self->slow == NULL) { /* cleared by the garbage collector */
        PyErr_SetString(rk_error_unavailable, "the limiter was deleted");
        return NULL;
    }
    return PyObject_Vectorcall(self->slow, args, (size_t)nargs, kwnames);
}

/* Read a number of units; those above any limit count as one more than the highest. */
static bool read_units(PyObject *value, int64_t *count)
{
    int overflow;
    *count = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (*count == -1 && !overflow && PyErr_Occurred())
        return false;
    if (overflow > 0 || *count > (int64_t)RK_UNITS_MAX * 2)
        *count = (int64_t)RK_UNITS_MAX * 2 + 1;
    if (overflow < 0 || *count < 0) {
        PyErr_SetString(PyExc_ValueError, "a number of units is not negative");
        return false;
    }
    return true;
}

/* The arguments that most calls share. Last, because conversions may have run any code. */
static bool read_call(gate_object *self, PyObject *text, PyObject *now, rk_subject *subject,
                      int64_t *now_ns)
{
    return rk_table_is_open(self->table) && rk_parse_now(self->table, now, now_ns) &&
           read_subject(self->table, text, subject);
}

static PyObject *gate_spend(gate_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    rk_subject subject;
    rk_decision decision;
    rk_status status;
    int64_t cost, now_ns;
    bool decided;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "spend(subject, cost, now_ns)");
        return NULL;
    }
    if (!read_units(args[1], &cost) || !read_call(self, args[0], args[2], &subject, &now_ns))
        return NULL;
    do
        status = rk_spend(self->table->table, &self->gate, &subject, now_ns, cost, true, &decided,
                          &decision);
    while (try_again(self, &subject, &status));
    self->table->waited = false;
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    if (!decided)
        Py_RETURN_NONE;
    return counted_decision(self, &decision);
}

static PyObject *gate_unspend(gate_object *self, PyObject *args)
{
    PyObject *text, *count, *now;
    rk_subject subject;
    rk_status status;
    long long charged_store_ns;
    int64_t units, now_ns;
    bool done;
    if (!PyArg_ParseTuple(args, "UOLO", &text, &count, &charged_store_ns, &now) ||
        !read_units(count, &units) || !read_call(self, text, now, &subject, &now_ns))
        return NULL;
    do
        status = rk_unspend(self->table->table, &self->gate, &subject, now_ns, units,
                            charged_store_ns, &done);
    while (try_again(self, &subject, &status));
    return status == RK_OK ? PyBool_FromLong(done) : rk_raise_status(self->table, status);
}

static PyObject *gate_look(gate_object *self, PyObject *args)
{
    PyObject *text, *now;
    rk_subject subject;
    rk_status status;
    rk_look look;
    int64_t now_ns;
    if (!PyArg_ParseTuple(args, "UO", &text, &now) ||
        !read_call(self, text, now, &subject, &now_ns))
        return NULL;
    do
        status = rk_look_at(self->table->table, &self->gate, &subject, now_ns, &look);
    while (try_again(self, &subject, &status));
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    return Py_BuildValue("(LL)", (long long)look.demand, (long long)look.held);
}

static PyObject *returned_units(gate_object *self, rk_status status, const rk_returned *returned)
{
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    if (returned->units == 0)
        Py_RETURN_NONE;
    return Py_BuildValue("(LL)", (long long)returned->units, (long long)returned->ends_store_ns);
}

static PyObject *gate_put(gate_object *self, PyObject *args)
{
    PyObject *text, *cost, *now;
    rk_subject subject;
    rk_returned returned;
    rk_status status;
    int allowed, place;
    int64_t now_ns;
    long long units, ends_ns, lasts_ns, denied_ns, remaining, reset_ns, decided_ns, charged_ns;
    if (!PyArg_ParseTuple(args, "UO(LLLL)(piLLLL)O", &text, &cost, &units, &ends_ns, &lasts_ns,
                          &denied_ns, &allowed, &place, &remaining, &reset_ns, &decided_ns,
                          &charged_ns, &now))
        return NULL;
    rk_answer answer = {
        .allowed = allowed != 0,
        .place = place,
        .units = units,
        .ends_store_ns = ends_ns,
        .lasts_ns = lasts_ns,
        .denied_ns = denied_ns,
        .remaining = remaining,
        .reset_after_ns = reset_ns,
        .decided_store_ns = decided_ns,
        .charged_store_ns = charged_ns,
    };
    if (!read_units(cost, &answer.cost) || !read_call(self, text, now, &subject, &now_ns))
        return NULL;
    do
        status = rk_put(self->table->table, &self->gate, &subject, now_ns, &answer, &returned);
    while (try_again(self, &subject, &status));
    return returned_units(self, status, &returned);
}

static PyObject *gate_deny(gate_object *self, PyObject *args)
{
    PyObject *text, *count, *now;
    rk_subject subject;
    rk_status status;
    long long lasts_ns;
    int64_t cost, now_ns;
    if (!PyArg_ParseTuple(args, "UOLO", &text, &count, &lasts_ns, &now) ||
        !read_units(count, &cost) || !read_call(self, text, now, &subject, &now_ns))
        return NULL;
    do
        status = rk_deny(self->table->table, &self->gate, &subject, now_ns, cost, lasts_ns);
    while (try_again(self, &subject, &status));
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    Py_RETURN_NONE;
}

static PyObject *gate_stop(gate_object *self, PyObject *text)
{
    rk_subject subject;
    rk_returned returned;
    rk_status status;
    int64_t now_ns;
    if (!read_call(self, text, Py_None, &subject, &now_ns))
        return NULL;
    do
        status = rk_stop(self->table->table, &self->gate, &subject, &returned);
    while (try_again(self, &subject, &status));
    return returned_units(self, status, &returned);
}

static PyObject *gate_claim(gate_object *self, PyObject *args)
{
    PyObject *text, *now;
    rk_subject subject;
    rk_status status;
    rk_claim claim;
    int64_t now_ns;
    if (!PyArg_ParseTuple(args, "UO", &text, &now) ||
        !read_call(self, text, now, &subject, &now_ns))
        return NULL;
    do
        status = rk_claim_pending(self->table->table, &self->gate, &subject, now_ns, &claim);
    while (try_again(self, &subject, &status));
    if (status != RK_OK)
        return rk_raise_status(self->table, status);
    if (claim.units == 0)
        Py_RETURN_NONE;
    return claim_as_tuple(&claim);
}

static PyObject *gate_counted(gate_object *self, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("(LL)", (long long)self->allowed, (long long)self->denied);
}

static PyMethodDef gate_methods[] = {
    {"check", (PyCFunction)(void (*)(void))gate_check, METH_FASTCALL | METH_KEYWORDS,
     "check($self, key, cost=1)\n--\n\nSpend cost units if the node has them."},
    {"spend", (PyCFunction)(void (*)(void))gate_spend, METH_FASTCALL,
     "spend($self, subject, cost, now_ns, /)\n--\n\nDecide on a subject; None: the node cannot."},
    {"unspend", (PyCFunction)gate_unspend, METH_VARARGS,
     "unspend(subject, units, charged_store_ns, now_ns)"},
    {"look", (PyCFunction)gate_look, METH_VARARGS, "look(subject, now_ns): demand and held"},
    {"put", (PyCFunction)gate_put, METH_VARARGS, "put(subject, cost, lease, answer, now_ns)"},
    {"deny", (PyCFunction)gate_deny, METH_VARARGS, "deny(subject, cost, lasts_ns, now_ns)"},
    {"stop", (PyCFunction)gate_stop, METH_O, "End the allowance of a subject."},
    {"claim", (PyCFunction)gate_claim, METH_VARARGS, "claim(subject, now_ns): pending units"},
    {"counted", (PyCFunction)gate_counted, METH_NOARGS,
     "How many calls were answered here: allowed and denied."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject rk_allowance_gate_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ratekeeper.decide.kernel._kernel.AllowanceGate",
    .tp_doc = "One rule's limits in a node's table.",
    .tp_basicsize = sizeof(gate_object),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = gate_new,
    .tp_dealloc = (destructor)gate_dealloc,
    .tp_traverse = (traverseproc)gate_traverse,
    .tp_clear = (inquiry)gate_clear,
    .tp_methods = gate_methods,
};
