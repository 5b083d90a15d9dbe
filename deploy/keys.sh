#!/bin/sh
# Makes what the federation of compose.yaml needs, in the folder in which it runs: an authority for a server that nodes reach
# as HOST (default: server), and a registered key for each of three sites. What is there already stays.
set -eu

[ -e authority/ca.key ] || fedrts keys init authority --host "${HOST:-server}"

number=0
for site in site-a site-b site-c; do
    [ -e "$site/$site.key" ] || fedrts keys issue "$site" --dir "$site"
    fedrts keys register "$site/$site.pub" --dir authority --clients "$number"
    number=$((number + 1))
done

# In a container this runs as root, the others as 10001. The authority's own key stays root's: no container mounts it.
if [ "$(id -u)" = 0 ]; then
    chown 10001:10001 authority/server.key site-*/site-*.key
fi
