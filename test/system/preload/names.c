// Preloaded into a test server: names under .test resolve to what the file of that name in the folder
// $RETRYSAFE_TEST_NAMES says: an address; or "none": there is no such name; or "hang": nobody answers for 8
// s.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int resolver(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **result) {
  resolver *const real = (resolver *)dlsym(RTLD_NEXT, "getaddrinfo");
  const char *const folder = getenv("RETRYSAFE_TEST_NAMES");
  const char *const domain = name ? strrchr(name, '.') : NULL;
  if (!folder || !domain || strcmp(domain, ".test") != 0) return real(name, service, hints, result);
  char path[PATH_MAX], answer[64] = "none";
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *const file = fopen(path, "r");
  if (file) {
    if (!fgets(answer, sizeof answer, file)) answer[0] = '\0';
    fclose(file);
  }
  if (strcmp(answer, "none") == 0) return EAI_NONAME;
  if (strcmp(answer, "hang") == 0) {
    sleep(8);
    return EAI_AGAIN;
  }
  return real(answer, service, hints, result);
}
