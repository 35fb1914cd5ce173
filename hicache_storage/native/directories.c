#define _GNU_SOURCE
#include "directories.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"

static int is_page_name(const char *name) {
    const size_t digits = strspn(name, "0123456789abcdef");
    return !name[digits] && digits >= PAGE_HASH_LEAST_DIGITS && digits <= PAGE_HASH_MOST_DIGITS;
}

static int is_regular(int fd, const struct dirent *entry) {
    if (entry->d_type != DT_UNKNOWN)
        return entry->d_type == DT_REG;
    struct stat status;
    return !fstatat(fd, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) && S_ISREG(status.st_mode);
}

static int names_add(names *all, const char *name) {
    const size_t nbytes = strlen(name) + 1;
    if (all->nbytes + nbytes > all->capacity) {
        const size_t capacity = 2 * all->capacity + 4096;
        char *text = realloc(all->text, capacity);
        if (!text)
            return -1;
        all->text = text;
        all->capacity = capacity;
    }
    memcpy(all->text + all->nbytes, name, nbytes);
    all->nbytes += nbytes;
    all->count++;
    return 0;
}

int64_t directory_list(const char *path, names *found) {
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) {
        const int failed = errno;
        if (fd >= 0)
            (void)close(fd);
        return failed == ENOENT || failed == ENOTDIR || failed == ELOOP ? MISS : -failed;
    }
    int64_t verdict = HIT;
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (!entry) {
            if (errno)
                verdict = -errno;
            break;
        }
        if (is_page_name(entry->d_name) && is_regular(fd, entry) && names_add(found, entry->d_name)) {
            verdict = -ENOMEM;
            break;
        }
    }
    (void)closedir(directory);
    return verdict;
}
