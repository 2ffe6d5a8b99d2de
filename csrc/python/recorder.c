/* The records of collectives for Python; see recorder.h. Owns the path and the header of the file
 * that a signal handler writes. */
#include "recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../core/recorder.h"

/* A file to write. The texts are allocated once and never change, because the handler may read
 * them at any time. */
typedef struct signal_file {
    char *path;
    char *header;
    size_t header_bytes;
    pid_t pid; /* the process that writes it; a forked child inherits the handler */
    struct sigaction previous;
} signal_file;

static signal_file *signal_files[NSIG];

PyObject *fcpy_recorder_read(PyObject *module, PyObject *count) {
    (void)module;
    const long wanted = PyLong_AsLong(count);
    if (wanted == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (wanted < 1 || wanted > FC_RECORDS) {
        PyErr_Format(PyExc_ValueError, "count must be 1 to %d, got %ld", FC_RECORDS, wanted);
        return NULL;
    }
    fc_record *records = (fc_record *)malloc(FC_RECORDS * sizeof *records);
    if (records == NULL) {
        return PyErr_NoMemory();
    }
    const size_t copied = fc_recorder_copy(records, (size_t)wanted);
    PyObject *result = Py_BuildValue("Ky#", (unsigned long long)fc_recorder_now(),
                                     (const char *)records, (Py_ssize_t)(copied * sizeof *records));
    free(records);
    return result;
}

/* Empties a file that was opened for writing. Refuses all but regular files of this user. Returns
 * 0, or -1 with errno. */
static int empty_file(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0) {
        return -1;
    }
    if (!S_ISREG(status.st_mode) || status.st_uid != geteuid()) {
        errno = EPERM;
        return -1;
    }
    return ftruncate(fd, 0);
}

/* Returns 0, or -1 with errno. Async-signal-safe. A file that exists is replaced only if it is a
 * regular file of this user. O_NOFOLLOW refuses a symbolic link as the last component of the path,
 * and O_NONBLOCK does not wait for the reader of a FIFO. */
static int write_file(const char *path, const char *header, size_t bytes) {
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    if (fd < 0) {
        return -1;
    }
    errno = 0;
    const bool written = empty_file(fd) == 0 && write(fd, header, bytes) == (ssize_t)bytes &&
                         fc_recorder_write(fd) == 0;
    const int error = errno != 0 ? errno : EIO; /* a short write sets no errno */
    const bool closed = close(fd) == 0;
    errno = written ? errno : error;
    return written && closed ? 0 : -1;
}

PyObject *fcpy_recorder_write(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *path = NULL;
    const char *header = NULL;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "O&y#:recorder_write", PyUnicode_FSConverter, &path, &header,
                          &bytes)) {
        return NULL;
    }
    const int result = write_file(PyBytes_AS_STRING(path), header, (size_t)bytes);
    if (result != 0) {
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, PyBytes_AS_STRING(path));
    }
    Py_DECREF(path);
    return result == 0 ? Py_NewRef(Py_None) : NULL;
}

/* Returns whether the default action runs after the file is written. It does not for SIGUSR1 and
 * SIGUSR2, whose handler only writes the file. It does not for signals whose default action neither
 * stops nor ends the process. */
static bool needs_default_action(int signum) {
    return signum != SIGUSR1 && signum != SIGUSR2 && signum != SIGCHLD && signum != SIGCONT &&
           signum != SIGURG && signum != SIGWINCH;
}

/* Runs the default action. If the action has only stopped the process (SIGTSTP), installs the
 * handler again when the process continues. */
static void run_default_action(int signum, const struct sigaction *action) {
    struct sigaction handler;
    sigset_t this_signal, before;
    (void)sigemptyset(&this_signal);
    (void)sigaddset(&this_signal, signum);
    (void)sigaction(signum, action, &handler);
    (void)raise(signum); /* blocked while the handler runs */
    (void)pthread_sigmask(SIG_UNBLOCK, &this_signal, &before);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)sigaction(signum, &handler, NULL);
}

/* Writes the file, but not in a forked child, because it is the file of the parent. Then the
 * previous action of the signal runs. SIG_DFL and SIG_IGN are tested first, because an action may
 * have them together with SA_SIGINFO. */
static void handle_signal(int signum, siginfo_t *info, void *context) {
    const int error = errno;
    signal_file *file = signal_files[signum];
    if (getpid() == file->pid) {
        (void)write_file(file->path, file->header, file->header_bytes);
    }
    if (file->previous.sa_handler == SIG_DFL) {
        if (needs_default_action(signum)) {
            run_default_action(signum, &file->previous);
        }
    } else if (file->previous.sa_handler != SIG_IGN) {
        if ((file->previous.sa_flags & SA_SIGINFO) != 0) {
            file->previous.sa_sigaction(signum, info, context);
        } else {
            file->previous.sa_handler(signum);
        }
    }
    errno = error;
}

static void free_signal_file(signal_file *file) {
    if (file != NULL) {
        free(file->path);
        free(file->header);
        free(file);
    }
}

static signal_file *new_signal_file(const char *path, const char *header, size_t bytes) {
    signal_file *file = (signal_file *)calloc(1, sizeof *file);
    if (file == NULL) {
        return NULL;
    }
    file->path = strdup(path);
    file->header = (char *)malloc(bytes > 0 ? bytes : 1);
    file->header_bytes = bytes;
    file->pid = getpid();
    if (file->path == NULL || file->header == NULL) {
        free_signal_file(file);
        return NULL;
    }
    memcpy(file->header, header, bytes);
    return file;
}

/* Installs the handler. Returns 0, or -1 with errno. */
static int install_handler(int signum, signal_file *file) {
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_RESTART};
    action.sa_sigaction = handle_signal;
    (void)sigemptyset(&action.sa_mask);
    if (signal_files[signum] != NULL) {
        /* An action that was installed since then stays, and may call this handler. The former file
         * is kept, because the handler may run on another thread. */
        file->previous = signal_files[signum]->previous;
        signal_files[signum] = file;
        return 0;
    }
    if (sigaction(signum, NULL, &file->previous) != 0) {
        return -1;
    }
    signal_files[signum] = file;
    if (sigaction(signum, &action, NULL) != 0) {
        signal_files[signum] = NULL;
        return -1;
    }
    return 0;
}

PyObject *fcpy_recorder_write_on_signal(PyObject *module, PyObject *args) {
    (void)module;
    int signum = 0;
    PyObject *path = NULL;
    const char *header = NULL;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "iO&y#:recorder_write_on_signal", &signum, PyUnicode_FSConverter,
                          &path, &header, &bytes)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (signum < 1 || signum >= NSIG) {
        PyErr_Format(PyExc_ValueError, "there is no signal %d", signum);
        goto done;
    }
    signal_file *file = new_signal_file(PyBytes_AS_STRING(path), header, (size_t)bytes);
    if (file == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (install_handler(signum, file) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        free_signal_file(file);
        goto done;
    }
    result = Py_NewRef(Py_None);
done:
    Py_DECREF(path);
    return result;
}
