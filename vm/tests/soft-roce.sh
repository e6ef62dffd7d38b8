# The links carry verbs traffic over their wires, and say on both ends that they are down.
. ./lib.sh
[ "$(ibv_devices | grep -cE ' (hca|peer)[01] ')" = 4 ]
[ "$(ibv_devinfo | grep -c PORT_ACTIVE)" = 4 ]
sent() { cat /sys/class/net/nic0/statistics/tx_packets; }
before=$(sent)
ibv_rc_pingpong -d peer0 -g 1 -n 200 -c &
until_true listening
ibv_rc_pingpong -d hca0 -g 1 -n 200 -c 127.0.0.1
wait $!
# 200 messages of 4 KiB, a packet each at this MTU.
[ $(($(sent) - before)) -ge 200 ]
ip link set pnic0 down
until_true port hca0 DOWN
until_true port peer0 DOWN
ip link set pnic0 up
until_true port hca0 ACTIVE
until_true port peer0 ACTIVE
