/* Shared by the files of the binding: module.c (quotas), requests_module.c and allowances_module.c.
 */
#ifndef RK_MODULE_H
#define RK_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "table.h"

extern PyObject *rk_error_unavailable;

/* A table of quotas, or of allowances. */
typedef struct {
    PyObject_HEAD rk_table *table; /* NULL once closed */
    rk_table *retired; /* the lost table that `table` replaced, while threads are still in it */
    PyObject *path;    /* as bytes, or NULL */
    PyObject *notice;  /* why a damaged file was created again; usually empty */
    PyObject *on_loss; /* called with this table and a text when the file was lost, or None */
    PyObject *now;     /* the clock's `now_ns`, for calls that give no time; NULL: real time */
    bool is_real;      /* `now` is that of the system's clock, which only a test replaces */
    rk_options options;
    int away;      /* threads in the table that have released the interpreter's lock */
    pid_t away_in; /* the process of these threads: a forked child has none of them */
    bool waited;   /* a check has just waited in vain, so its retry must not wait again */
    bool closing;
} rk_table_object;

/* A Counter is one rule's limits on a table, and a FastCheck is its check with a plain key. */
typedef struct {
    PyObject_HEAD rk_table_object *table;
    PyObject *limits, *rule;
    PyObject *slow;          /* of a FastCheck: the Python path */
    long long stamp;         /* of the one request that it serves; 0: of all */
    int64_t allowed, denied; /* by a FastCheck; the interpreter's lock protects them */
    int count;
    rk_limit numbers[RK_LIMITS_MAX];
} rk_counter_object;

extern PyTypeObject rk_table_type, rk_counter_type, rk_counted_type, rk_request_check_type;
extern PyTypeObject rk_allowances_type, rk_allowance_gate_type;

PyObject *rk_make_decision(PyObject *limits, PyObject *rule, const rk_decision *decided);
/* Set Decision.source. It takes over the reference. */
void rk_set_source(PyObject *decision, PyObject *source);

/* What both kinds of table have. */
PyObject *rk_table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
void rk_table_dealloc(rk_table_object *self);
int rk_table_traverse(rk_table_object *self, visitproc visit, void *arg);
int rk_table_clear(rk_table_object *self);
PyObject *rk_table_close(rk_table_object *self, PyObject *unused);
PyObject *rk_table_reopen(rk_table_object *self, PyObject *unused);
PyObject *rk_table_now_ns(rk_table_object *self, PyObject *unused);
extern PyMemberDef rk_table_members[];

/* Between these two the interpreter's lock is released; a close() meanwhile is deferred. */
PyThreadState *rk_leave(rk_table_object *self);
void rk_back(rk_table_object *self, PyThreadState *thread);
/* Raises StoreUnavailable if it is closed. */
bool rk_table_is_open(rk_table_object *self);
/* The time of a call: a number, or the clock's for None. The clock may run any code. */
bool rk_parse_now(rk_table_object *self, PyObject *value, int64_t *now_ns);
PyObject *rk_raise_status(rk_table_object *self, rk_status status);

/* Wait for a taken lock without blocking other threads; return whether to try again. */
typedef rk_status (*rk_wait_function)(rk_table *table, rk_hash subject, int64_t timeout_ns);
bool rk_try_again(rk_table_object *self, rk_wait_function wait, rk_hash hash, rk_status *status);

/* Return the bytes of the key of check(key, cost=1); NULL if the slow path has to decide, because
 * something about the call is not ordinary. */
const char *rk_plain_check(rk_table_object *table, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames, Py_ssize_t *length, int64_t *cost);

#endif
