/* Preloaded into fsx: reads and writes the file under test with O_DIRECT, through an aligned buffer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

enum { ALIGNMENT = 4096 };

/* fsx opens nothing else for reading and writing. */
int open64(const char *path, int flags, ...)
{
    int (*next)(const char *, int, mode_t) = dlsym(RTLD_NEXT, "open64");
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    return next(path, (flags & O_ACCMODE) == O_RDWR ? flags | O_DIRECT : flags, mode);
}

static void *aligned(size_t size)
{
    void *buffer = NULL;
    errno = posix_memalign(&buffer, ALIGNMENT, size ? size : 1);
    return errno ? NULL : buffer;
}

ssize_t pread64(int fd, void *bytes, size_t size, off64_t offset)
{
    ssize_t (*next)(int, void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pread64");
    void *buffer = aligned(size);
    if (!buffer)
        return -1;
    ssize_t read = next(fd, buffer, size, offset);
    if (read > 0)
        memcpy(bytes, buffer, read);
    free(buffer);
    return read;
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset)
{
    ssize_t (*next)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
    void *buffer = aligned(size);
    if (!buffer)
        return -1;
    memcpy(buffer, bytes, size);
    ssize_t written = next(fd, buffer, size, offset);
    free(buffer);
    return written;
}
