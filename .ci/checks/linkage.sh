#!/usr/bin/env bash
# Each library needs the C++ runtime and what src/sources.txt links it with; retrysafe.so needs no client library.
# Reads what `make` built, here or in the folder given.
set -euo pipefail
cd "${1:-$(dirname "$0")/../..}"
status=0
for library in retrysafe*.so; do
  [ -e "$library" ] || { echo "there is no build: run make"; exit 1; }
  # An older build says nothing about the list as it is now.
  [ "$library" -nt src/sources.txt ] || { echo "$library is older than src/sources.txt: run make, or remove what make does not make any more"; exit 1; }
  name=${library#retrysafe} name=${name#_} name=${name%.so}
  allowed='libstdc\+\+|libc|libm|libgcc_s|ld-linux-[a-z0-9-]+'
  for own in $(awk -v library="${name:-server}" '$1 == library && sub(/^-l/, "", $2) { print $2 }' src/sources.txt); do
    allowed+="|lib$own"
  done
  if readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -vxE "($allowed)(-gnutls)?\.so\.[0-9.]+" |
    sed "s/^/$library needs /"; then
    status=1
  fi
done
exit $status
