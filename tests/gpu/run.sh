#!/bin/bash
# Runs the parts that are named, or all: run.sh [--list] [--out DIR] [PART...]
self=${BASH_SOURCE[0]}
[[ $self == */* ]] || self=./$self
here=$(cd "${self%/*}" && pwd)
exec "$here/bin/gpu-run" --bundle "$here" "$@"
