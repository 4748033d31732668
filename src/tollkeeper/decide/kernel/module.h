/* Shared by the two files of the binding: module.c (quotas) and allowances_module.c. */
#ifndef TK_MODULE_H
#define TK_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "table.h"

extern PyObject *tk_error_unavailable;

/* A table of quotas, or of allowances. */
typedef struct {
    PyObject_HEAD tk_table *table; /* NULL once closed */
    tk_table *retired; /* the lost table that `table` replaced, while threads are still in it */
    PyObject *path;    /* as bytes, or NULL */
    PyObject *notice;  /* why a damaged file was created again; usually empty */
    PyObject *on_loss; /* called with this table and a text when the file was lost, or None */
    tk_options options;
    int away;      /* threads in the table that have released the interpreter's lock */
    pid_t away_in; /* the process of these threads: a forked child has none of them */
    bool waited;   /* a check has just waited in vain, so its retry must not wait again */
    bool closing;
} tk_table_object;

extern PyTypeObject tk_allowances_type, tk_allowance_gate_type;

PyObject *tk_make_decision(PyObject *limits, PyObject *rule, const tk_decision *decided);

/* What both kinds of table have. */
PyObject *tk_table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs);
void tk_table_dealloc(tk_table_object *self);
PyObject *tk_table_close(tk_table_object *self, PyObject *unused);
PyObject *tk_table_reopen(tk_table_object *self, PyObject *unused);
PyObject *tk_table_now_ns(tk_table_object *self, PyObject *unused);
extern PyMemberDef tk_table_members[];

/* Between these two the interpreter's lock is released; a close() meanwhile is deferred. */
PyThreadState *tk_leave(tk_table_object *self);
void tk_back(tk_table_object *self, PyThreadState *thread);
/* Raises StoreUnavailable if it is closed. */
bool tk_table_is_open(tk_table_object *self);
bool tk_parse_now(tk_table_object *self, PyObject *value, int64_t *now_ns);
PyObject *tk_raise_status(tk_table_object *self, tk_status status);

/* Wait for a taken lock without blocking other threads; return whether to try again. */
typedef tk_status (*tk_wait_function)(tk_table *table, tk_hash subject, int64_t timeout_ns);
bool tk_try_again(tk_table_object *self, tk_wait_function wait, tk_hash hash, tk_status *status);

/* Return the bytes of the key of check(key, cost=1); NULL if the slow path has to decide, because
 * something about the call is not ordinary. */
const char *tk_plain_check(tk_table_object *table, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames, Py_ssize_t *length, int64_t *cost);

#endif
