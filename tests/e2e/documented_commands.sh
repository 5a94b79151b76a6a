#!/usr/bin/env bash
# Every command in a ```sh block of the documents, as it stands there.
# Not run: `./dev test` alone, which is what runs this, and `./dev verify`, which CI runs beside it. (README's "sh consumer": find_package.sh.)
source "$(dirname "${BASH_SOURCE[0]}")/support.sh"

count=0
for document in README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs/*.md docs/*/*.md; do
  while read -r line; do
    case $line in
      "" | "./dev test" | "./dev verify") continue ;;
    esac
    printf '+ %s (%s)\n' "$line" "$document"
    bash -ec "$line" >"$work/log" 2>&1 </dev/null || die "$line, in $document:"$'\n'"$(cat "$work/log")"
    count=$((count + 1))
  done < <(fenced "$document" sh)
done
[ "$count" -ge 4 ] || die "only $count commands were found: is the search broken?"

# Files that documents link to exist. (A lambda in a snippet is no link.)
while IFS=: read -r document link; do
  target=$(dirname "$document")/${link%%#*}
  [ -e "$target" ] || die "$document links to $link, which does not exist"
done < <(grep -oE '[^]&=[]\]\([^) ]+\)' README.md CONTRIBUTING.md SECURITY.md docs/*.md docs/*/*.md |
  sed -E 's/:.\]\(/:/; s/\)$//' | grep -v ':http')
