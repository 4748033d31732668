/* Shared by the drivers that kill a process at every instruction of a call. */
#ifndef RK_TEST_STEPPING_H
#define RK_TEST_STEPPING_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "layout.h"
#include "limits.h"

enum { FILE_BYTES_MAX = 1 << 20 };

/* Run the child for `instructions`; return false if it ended before. */
static inline bool run_child(pid_t child, long instructions)
{
    int state;
    for (long i = 0; i < instructions; i++) {
        REQUIRE(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0, "%s", strerror(errno));
        REQUIRE(waitpid(child, &state, 0) == child, "%s", strerror(errno));
        if (WIFEXITED(state))
            return false;
        REQUIRE(WIFSTOPPED(state) && WSTOPSIG(state) == SIGTRAP, "the child: %d", state);
    }
    return true;
}

static inline size_t read_file(const char *path, uint64_t words[FILE_BYTES_MAX / 8])
{
    int file = open(path, O_RDONLY);
    ssize_t length = read(file, words, FILE_BYTES_MAX);
    REQUIRE(length > 0 && length < FILE_BYTES_MAX, "%s has %zd bytes", path, length);
    close(file);
    return (size_t)length;
}

static inline void copy_file(const char *from, const char *to)
{
    static uint64_t words[FILE_BYTES_MAX / 8];
    size_t length = read_file(from, words);
    int target = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    REQUIRE(write(target, words, length) == (ssize_t)length, "%s", strerror(errno));
    close(target);
}

/* Return whether the file differs from the last call. If not, a process killed here leaves the same
 * behind as one that was killed there. */
static inline bool has_changed(const rk_table *table, bool is_first)
{
    static uint8_t last[FILE_BYTES_MAX];
    REQUIRE(table->bytes <= sizeof last, "%zu bytes", table->bytes);
    if (!is_first && memcmp(last, table->base, table->bytes) == 0)
        return false;
    memcpy(last, table->base, table->bytes);
    return true;
}

#endif
