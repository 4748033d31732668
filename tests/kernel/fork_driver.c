/* A forked child is a user of the file at every moment.
 *
 * The child of a fork opens the file again, under its own name. If it released what it inherited
 * before it had registered, another process could find the file unused in between, and would repair
 * it while the child uses it. So the parent closes its own table, single-steps the child through
 * its fork handler (ptrace), and asks after each instruction whether the file has a user.
 *
 *   fork_driver FOLDER */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "layout.h"
#include "limits.h"

bool rk_alone(int fd);

/* Registered before the table's own handler, so that it runs first. */
static void stop_in_child(void)
{
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    raise(SIGSTOP);
}

int main(int count, char **arguments)
{
    char path[512];
    int state;
    long steps = 0;
    REQUIRE(count == 2, "usage: fork_driver FOLDER");
    snprintf(path, sizeof path, "%s/fork.limits", arguments[1]);
    pthread_atfork(NULL, NULL, stop_in_child);
    rk_table *table = open_or_die(&(rk_options){.path = path, .capacity = 10, .log_bytes = 64});
    pid_t child = fork();
    REQUIRE(child >= 0, "%s", strerror(errno));
    if (child == 0)
        _exit(table->owner == 0);
    REQUIRE(waitpid(child, &state, 0) == child && WIFSTOPPED(state), "the child: %d", state);
    rk_close(table);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0, "%s", strerror(errno));
    for (;;) {
        REQUIRE(!rk_alone(fd), "nobody uses the file after %ld instructions", steps);
        REQUIRE(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0, "%s", strerror(errno));
        REQUIRE(waitpid(child, &state, 0) == child, "%s", strerror(errno));
        if (WIFEXITED(state))
            break;
        REQUIRE(WIFSTOPPED(state) && WSTOPSIG(state) == SIGTRAP, "the child: %d", state);
        steps++;
    }
    REQUIRE(WEXITSTATUS(state) == 0, "the child has no index");
    REQUIRE(rk_alone(fd), "an ended process still uses the file");
    printf("%ld instructions\n", steps);
    return 0;
}
