#!/bin/sh
# Prints what /sys says of this machine's RDMA ports, and of where they and its GPUs are, in the form that tests/sysfs.rs
# reads: `path -> target` for links and `path = text` for files, below /sys. Needs no rights.
#
#   sh verbs/tests/sysfs/record.sh > verbs/tests/sysfs/NAME.tree
cd "${1:-/sys}" || exit

link() { echo "$1 -> $(readlink "$1")"; }
file() { text=$(cat "$1" 2>/dev/null) && echo "$1 = $text"; }

for device in class/infiniband/*; do
    [ -e "$device" ] || continue
    link "$device"
    if [ -e "$device/device" ]; then
        link "$device/device"
        file "$device/device/numa_node"
        # Of a virtual function.
        [ -e "$device/device/physfn" ] && link "$device/device/physfn"
    fi
    for port in "$device"/ports/*; do
        file "$port/state"
        file "$port/rate"
        file "$port/link_layer"
        # A table may have a thousand places.
        grep -H -v '^0000:0000:0000:0000:0000:0000:0000:0000$' "$port"/gids/* | while IFS=: read -r gid text; do
            echo "$gid = $text"
            file "$port/gid_attrs/types/${gid##*/}"
        done
    done
done
# Display controllers and accelerators of NVIDIA.
for device in bus/pci/devices/*; do
    case $(cat "$device/vendor" 2>/dev/null) in 0x10de) ;; *) continue ;; esac
    case $(cat "$device/class") in
    0x0300* | 0x0302*)
        link "$device"
        file "$device/numa_node"
        ;;
    esac
done
