/* The number of users by process group; see group_users.h. */
#include "group_users.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct user_count {
    struct user_count *next;
    int64_t count;
    char name[]; /* of the process group */
} user_count;

static user_count *user_counts;

static user_count **find_count(const char *name) {
    user_count **at = &user_counts;
    while (*at != NULL && strcmp((*at)->name, name) != 0) {
        at = &(*at)->next;
    }
    return at;
}

bool fct_group_users_add(const char *name) {
    assert(name != NULL);
    user_count **at = find_count(name);
    if (*at == NULL) {
        const size_t bytes = strlen(name) + 1;
        *at = (user_count *)calloc(1, sizeof **at + bytes);
        if (*at == NULL) {
            return false;
        }
        memcpy((*at)->name, name, bytes);
    }
    (*at)->count++;
    return true;
}

int64_t fct_group_users_take(const char *name) {
    assert(name != NULL);
    user_count **at = find_count(name);
    user_count *entry = *at;
    if (entry == NULL) {
        return 1;
    }
    const int64_t count = entry->count;
    *at = entry->next;
    free(entry);
    return count;
}
