#!/bin/bash
# slurm_nodes.sh start|stop|controller-up DIR, node-up DIR n1|n2 -- a private Slurm of two nodes on this machine, everything under DIR.
#
# No systemd, no cgroups, no accounting. Each slurmd has a UTS namespace of its own, so that its jobs see a host named
# n1 or n2: without it perun, MPI and our sampler would take both nodes for one. And a mount namespace with a
# /etc/hosts that knows both names, and a boot id of its own. And a time namespace, so that each has a monotonic clock
# of its own: the second node's is 1000 s ahead.
set -euo pipefail
command=$1; D=$(readlink -m "$2"); node=${3:-}
P=${SLURM_BASE_PORT:-17000}
export SLURM_CONF=$D/etc/slurm.conf
H=$(hostname -s)

node_up() {
  cat /proc/sys/kernel/random/uuid > "$D/etc/boot-$1"
  unshare --uts --mount --time --monotonic "${1#n}000" --fork -- sh -c 'hostname "$0" && mount --bind "$1/etc/hosts" /etc/hosts &&
    mount --bind "$1/etc/boot-$0" /proc/sys/kernel/random/boot_id && exec slurmd -N "$0"' "$1" "$D"
}

case $command in
start)
  mkdir -p "$D"/{etc,log,run,state,munge,spool/n1,spool/n2}
  chmod 755 "$D" "$D"/{log,run,state}; chmod 700 "$D/munge"
  dd if=/dev/urandom of="$D/munge/key" bs=1 count=1024 status=none; chmod 600 "$D/munge/key"
  munged --key-file="$D/munge/key" --socket="$D/run/munge.sock" --pid-file="$D/munge/munged.pid" \
         --log-file="$D/munge/munged.log" --seed-file="$D/munge/seed" --force
  { cat /etc/hosts; echo 127.0.0.1 n1 n2; } > "$D/etc/hosts"
  cat > "$SLURM_CONF" <<CONF
ClusterName=energynn
SlurmctldHost=$H(127.0.0.1)
SlurmctldPort=$P
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
# cred_expire is how long a requeued job has to wait: two minutes by default, and for anything below five seconds
AuthInfo=socket=$D/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
# PMIx makes folders there that two nodes of one machine must not share
TmpFS=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.pid
SlurmdPidFile=$D/run/slurmd-%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
SlurmctldTimeout=10
SlurmdTimeout=5
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=$((P + 1)) CPUs=2 CoresPerSocket=2 RealMemory=4000
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=$((P + 2)) CPUs=2 CoresPerSocket=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  slurmctld -i
  node_up n1; node_up n2
  for _ in $(seq 100); do
    [ "$(timeout 2 sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && exit 0
    sleep 0.1
  done
  echo "not all nodes are idle" >&2; timeout 2 sinfo >&2; exit 1;;
controller-up) slurmctld -i;;
node-up) node_up "$node";;
stop)
  timeout 5 scancel --user="$(id -un)" 2>/dev/null || true
  for _ in $(seq 100); do [ -z "$(timeout 2 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
  cat "$D"/run/*.pid "$D/munge/munged.pid" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true;;
esac
