#!/usr/bin/env bash
# A real Slurm cluster on one machine, to try sbatch scripts on and to break: munged, slurmctld and several slurmd,
# each posing as one node with GPUs that are not there.  No systemd, no cgroups, no database.
#
#   dev-cluster.sh install        installs the four packages needed (root, Debian or Ubuntu)
#   dev-cluster.sh up             starts what is not running
#   dev-cluster.sh down           cancels jobs, stops everything this script started, undoes /etc/hosts
#   dev-cluster.sh status         one line for each daemon, and sinfo; exits 0 only if all is healthy
#   dev-cluster.sh env            prints export lines:  eval "$(slurm/dev-cluster.sh env)"
#   dev-cluster.sh final JOBID [S]  waits up to S seconds (300) until JOBID has ended; prints
#                                 "JOBID STATE EXITCODE RESTARTS"; exits 0 only if COMPLETED, 124 if it runs on
#   dev-cluster.sh node-crash NODE [now]  power loss: SIGSTOP to its slurmd, slurmstepds and tasks (peers hear
#                                 nothing; Slurm says DOWN about 25 s later and requeues or fails the jobs;
#                                 "now": tells slurmctld at once)
#   dev-cluster.sh node-kill NODE [now]   SIGKILL to the same, daemons first (peers see closed connections)
#   dev-cluster.sh slurmd-kill NODE       SIGKILL to the slurmd alone; its jobs run on
#   dev-cluster.sh node-start NODE        brings the node back after any of these
#
# Environment (defaults); all but SLURM_DEV_DIR are read by `up` only:
#   SLURM_DEV_DIR=/tmp/slurm-dev   everything it writes
#   SLURM_DEV_PORT=26817           of slurmctld; nodes take the ports after it
#   SLURM_DEV_NODES=4  SLURM_DEV_GPUS=8  SLURM_DEV_GPU_TYPE=h100
#   SLURM_DEV_CPUS=64  SLURM_DEV_MEM_MB=1000000       (declared, not real: config_overrides)
#   SLURM_DEV_CLUSTER=slurmdev     SLURM_DEV_PARTITION=dev (more, comma separated, share the nodes)
#   SLURM_DEV_UTS=auto|0           each node in a UTS namespace of its own, so that `hostname` says node2
#   SLURM_DEV_HOSTS=auto|0         adds the nodes to /etc/hosts (undone by down)
#   SLURM_DEV_SLURMD_TIMEOUT=10    seconds of silence before a node is DOWN
#   SLURM_DEV_CRED_EXPIRE=5        also the delay before a requeued job may start again
#   SLURM_DEV_FIRST_JOBID=1        job ids start here after each fresh `up`
#   SLURM_DEV_KEEP=0               1: `up` keeps job queue and ids of the previous run
#   SLURM_DEV_EXTRA=FILE           appended to slurm.conf
set -euo pipefail

: "${SLURM_DEV_DIR:=/tmp/slurm-dev}" "${SLURM_DEV_PORT:=26817}" "${SLURM_DEV_NODES:=4}"
: "${SLURM_DEV_GPUS:=8}" "${SLURM_DEV_GPU_TYPE:=h100}" "${SLURM_DEV_CPUS:=64}" "${SLURM_DEV_MEM_MB:=1000000}"
: "${SLURM_DEV_CLUSTER:=slurmdev}" "${SLURM_DEV_PARTITION:=dev}" "${SLURM_DEV_UTS:=auto}" "${SLURM_DEV_HOSTS:=auto}"
: "${SLURM_DEV_SLURMD_TIMEOUT:=10}" "${SLURM_DEV_CRED_EXPIRE:=5}" "${SLURM_DEV_KEEP:=0}"
: "${SLURM_DEV_FIRST_JOBID:=1}" "${SLURM_DEV_EXTRA:=}"
case $SLURM_DEV_DIR in /*) ;; *) SLURM_DEV_DIR=$PWD/$SLURM_DEV_DIR ;; esac
D=$SLURM_DEV_DIR
PATH=$PATH:/usr/sbin:/sbin
MARK="SLURM_DEV_MARK=$D"                       # in every daemon's environment: how we know our own
HOSTS_TAG="# dev-cluster $D"
for v in "${!SLURM_@}"; do case $v in SLURM_DEV_*) ;; *) unset "$v" ;; esac; done   # may be called from a job
CONF=$D/etc/slurm.conf
export SLURM_CONF=$CONF
say() { printf 'dev-cluster: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# --- processes: by pid + start time (safe against pid reuse) + our mark in the environment -------
ptime() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s; echo "${20}"; }
zombie() { local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 0; s=${s##*) }; [ "${s%% *}" = Z ]; }
pid_of() {  # NAME -> its live pid, or fail
  local p t; [ -s "$D/run/$1.pid" ] && read -r p t < "$D/run/$1.pid" || return 1
  [ "$(ptime "$p" || echo gone)" = "$t" ] && ! zombie "$p" && echo "$p"
}
state_of() {
  local p s; p=$(pid_of "$1") || { echo stopped; return; }
  s=$(cat "/proc/$p/stat" 2>/dev/null) || { echo stopped; return; }
  s=${s##*) }; case $s in T*) echo frozen ;; *) echo running ;; esac
}
spawn() {   # NAME CMD... : detached, foreground-mode daemon, stdout/stderr to log
  local name=$1 p; shift
  env -C "$D" -i PATH="$PATH" HOME="${HOME:-/}" LANG=C.UTF-8 "$MARK" SLURM_DEV_DAEMON="$name" SLURM_CONF="$CONF" \
    setsid "$@" </dev/null >>"$D/log/$name.out" 2>&1 9>&- &
  p=$!; disown "$p" 2>/dev/null || true
  echo "$p $(ptime "$p" || echo 0)" > "$D/run/$name.pid"
}
stop() {    # NAME [SIGNAL]: end it, wait, SIGKILL after 5 s
  local p i; p=$(pid_of "$1") || { rm -f "$D/run/$1.pid"; return 0; }
  kill -"${2:-TERM}" "$p" 2>/dev/null || true
  for i in $(seq 100); do pid_of "$1" >/dev/null || break; [ "$i" = 50 ] && kill -KILL "$p" 2>/dev/null; sleep 0.1; done
  rm -f "$D/run/$1.pid"
}
with_env() { local f; f=$(grep -slzxF -- "$1" /proc/[0-9]*/environ || true)    # NAME=VALUE [REGEX] -> pids
  [ -z "$f" ] || [ $# = 1 ] || f=$(grep -slzx -- "$2" $f || true)
  for f in $f; do f=${f#/proc/}; echo "${f%/environ}"; done; }
tree() {    # PID... -> these and all their descendants
  local p c; for p; do echo "$p"; c=$(cat /proc/"$p"/task/*/children 2>/dev/null || true); [ -z "$c" ] || tree $c; done
}
ours() {    # [NODE] -> our daemons and slurmstepds, then their descendants and detached tasks
  # A slurmstepd overwrites its environment with its title; what gives it away is its open log file.
  local m p f; m=$(with_env "$MARK" ${1:+"SLURM_DEV_DAEMON=slurmd-$1"})
  for f in $(find /proc/[0-9]*/fd -lname "$D/log/slurmd-${1:-node*}.log" 2>/dev/null || true); do
    p=${f#/proc/}; p=${p%%/*}
    case $(cat "/proc/$p/comm" 2>/dev/null) in slurmd|slurmstepd) m="$m $p" ;; esac
  done
  for p in $m $(tree $m $(with_env "SLURM_CONF=$CONF" "SLURMD_NODENAME=${1:-.*}")); do
    case " $$ $BASHPID $PPID 1 " in *" $p "*) ;; *) echo "$p" ;; esac
  done | awk '!seen[$0]++'
}
reap() { local p; for p in $(ours "$@"); do kill -"${SIG:-KILL}" "$p" 2>/dev/null || true; done; }

down_now() { [ "$2" != now ] || scontrol update "NodeName=$1" State=DOWN Reason=dev-cluster; }

nodes() { local i; for ((i = 0; i < SLURM_DEV_NODES; i++)); do echo "node$i"; done; }
addr() { echo "127.0.1.$((10 + ${1#node}))"; }
# What /etc/hosts says: with UTS namespaces each node its own loopback address; without them this machine's,
# else torchrun's c10d rendezvous finds no agent whose hostname matches MASTER_ADDR and nobody opens the store.
name_addr() {
  if can_uts; then addr "$1"
  else getent ahostsv4 "$(hostname)" | awk 'NR==1{print $1; f=1} END{if(!f) print "127.0.0.1"}'; fi
}
port() { echo $((SLURM_DEV_PORT + 1 + ${1#node})); }

write_conf() {
  local h u i n; h=$(hostname -s 2>/dev/null || hostname); u=$(id -un)
  local last=$((SLURM_DEV_NODES - 1))
  mkdir -p "$D"/{etc,log,run,munge,dev,state,spool}; chmod 755 "$D" "$D"/{etc,run}; chmod 711 "$D/munge"
  for ((i = 0; i < SLURM_DEV_GPUS; i++)); do   # a device node like /dev/null, or a file (then slurmd only grumbles)
    [ -e "$D/dev/nvidia$i" ] || mknod -m 666 "$D/dev/nvidia$i" c 1 3 2>/dev/null || : > "$D/dev/nvidia$i"
  done
  [ -s "$D/etc/munge.key" ] || { (umask 077; head -c 128 /dev/urandom > "$D/etc/munge.key"); }
  chmod 600 "$D/etc/munge.key"
  {
    cat <<C
# written by dev-cluster.sh; edits are lost
ClusterName=$SLURM_DEV_CLUSTER
SlurmctldHost=$h(127.0.0.1)
SlurmctldPort=$SLURM_DEV_PORT
SlurmUser=$u
SlurmdUser=$u
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits (Reason=BeginTime) before it may start; default 120
AuthInfo=socket=$D/munge/munge.socket,cred_expire=$SLURM_DEV_CRED_EXPIRE
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool/%n
SlurmctldPidFile=$D/run/slurmctld.own.pid
SlurmdPidFile=$D/run/slurmd-%n.own.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no cgroups, no binding, no memory enforcement
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
PropagateResourceLimits=NONE
MpiDefault=none
MailProg=/bin/true
SwitchType=switch/none
# declared hardware is believed, whatever the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# het jobs are started by the backfill scheduler only: make it run every second
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
# no database: final states from scontrol (MinJobAge) and this text file
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$D/log/jobcomp.txt
MinJobAge=86400
MaxJobCount=20000
FirstJobId=$SLURM_DEV_FIRST_JOBID
JobRequeue=1
# short timeouts, for tests
SlurmdTimeout=$SLURM_DEV_SLURMD_TIMEOUT
SlurmctldTimeout=30
MessageTimeout=10
BatchStartTimeout=10
KillWait=5
# > 60: after its batch host dies a step's other nodes need 60 s to give up on srun's sockets; with less they are
# drained ("Kill task failed")
UnkillableStepTimeout=120
InactiveLimit=0
Waittime=0
ReturnToService=2
C
    for n in $(nodes); do
      echo "NodeName=$n NodeHostname=$n NodeAddr=$(addr "$n") Port=$(port "$n")" \
        "CPUs=$SLURM_DEV_CPUS Boards=1 SocketsPerBoard=2 CoresPerSocket=$((SLURM_DEV_CPUS / 2)) ThreadsPerCore=1" \
        "RealMemory=$SLURM_DEV_MEM_MB TmpDisk=1000000 Feature=$SLURM_DEV_GPU_TYPE" \
        "Gres=gpu:$SLURM_DEV_GPU_TYPE:$SLURM_DEV_GPUS State=UNKNOWN"
    done
    local first=YES part
    for part in ${SLURM_DEV_PARTITION//,/ }; do
      echo "PartitionName=$part Nodes=node[0-$last] Default=$first" \
        "MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe=NO"
      first=NO
    done
    [ -z "$SLURM_DEV_EXTRA" ] || cat "$SLURM_DEV_EXTRA"
  } > "$CONF"
  echo "NodeName=node[0-$last] Name=gpu Type=$SLURM_DEV_GPU_TYPE File=$D/dev/nvidia[0-$((SLURM_DEV_GPUS - 1))]" \
    > "$D/etc/gres.conf"
  echo '# not used' > "$D/etc/cgroup.conf"
}

hosts() { if [ -w /etc/hosts ]; then flock -w 30 7 || true; "$@"; else "$@"; fi 7< /etc/hosts; }   # one cluster at a time
hosts_del() {  # rewritten in place: /etc/hosts is a bind mount in containers
  [ -w /etc/hosts ] && grep -qF -- "$HOSTS_TAG" /etc/hosts || return 0
  local t; t=$(awk -v tag=" $HOSTS_TAG" 'substr($0, length($0) - length(tag) + 1) != tag' /etc/hosts; echo .)
  printf '%s' "${t%.}" | dd of=/etc/hosts conv=notrunc status=none   # never empty: others look names up meanwhile
  truncate -s "$(printf '%s' "${t%.}" | wc -c)" /etc/hosts
}
hosts_add() {
  [ "$SLURM_DEV_HOSTS" = auto ] || return 0
  local n; hosts_del
  [ ! -w /etc/hosts ] || [ -z "$(tail -c 1 /etc/hosts)" ] || echo >> /etc/hosts
  for n in $(nodes); do
    if [ -w /etc/hosts ]; then echo "$(name_addr "$n") $n $HOSTS_TAG" >> /etc/hosts
    else [ "$(getent ahostsv4 "$n" | awk 'NR==1{print $1}')" = "$(name_addr "$n")" ] ||
      say "warning: cannot write /etc/hosts; $n will not resolve (MASTER_ADDR!)"; fi
  done
}
can_uts() { [ "$SLURM_DEV_UTS" = auto ] && command -v unshare >/dev/null && unshare --uts true 2>/dev/null; }

start_node() {
  local n=$1; pid_of "slurmd-$n" >/dev/null && return 0
  mkdir -p "$D/spool/$n"
  set -- "$(command -v slurmd)" -D -N "$n" -f "$CONF"
  ! can_uts || set -- unshare --uts -- sh -c 'hostname "$1" && shift && exec "$@"' sh "$n" "$@"
  spawn "slurmd-$n" "$@"
}
wait_for() {  # SECONDS COMMAND...
  local t=$((SECONDS + $1)); shift
  while ! "$@" >/dev/null 2>&1; do [ $SECONDS -le $t ] || return 1; sleep 0.1; done
}
names() { echo munged slurmctld; nodes | sed 's/^/slurmd-/'; }
dead() { local n; for n in $(names); do pid_of "$n" >/dev/null || { echo "$n"; return 0; }; done; return 1; }
ready_or_dead() { nodes_ok || dead; }
nodes_ok() {  # every node answering and usable
  local s='$2 ~ /^(idle|mixed|allocated|completing)$/ {print $1}'
  [ "$(timeout 5 sinfo -h -a -N -o '%N %T' | awk "$s" | sort -u | wc -l)" = "$SLURM_DEV_NODES" ]
}
# No `| grep -q`: it leaves at its first match, and a writer killed by SIGPIPE then fails the pipe.
node_ok() { grep -qxE 'idle|mixed|allocated|completing' <<<"$(timeout 5 sinfo -h -a -N -n "$1" -o %T)"; }
logs() { tail -n 15 "$D"/log/{munged,slurmctld,slurmd-node0}.{out,log} 2>/dev/null >&2 || true; }

up() {
  local c n p any=0
  for c in munged slurmctld slurmd sinfo; do command -v $c >/dev/null || die "$c not found: run '$0 install'"; done
  mkdir -p "$D"; exec 9> "$D/.lock"; flock -w 60 9 || die "another dev-cluster.sh holds $D/.lock"
  for n in $(names); do pid_of "$n" >/dev/null && any=1; done
  if [ $any = 0 ]; then   # fresh start
    reap                    # leftovers of a run whose directory was removed
    for ((p = SLURM_DEV_PORT; p <= SLURM_DEV_PORT + SLURM_DEV_NODES; p++)); do
      ! (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null || die "port $p is taken: set SLURM_DEV_PORT"
    done
    [ "$SLURM_DEV_KEEP" = 1 ] || rm -rf "$D"/{state,spool,log}
    rm -rf "$D/run" "$D/munge"
    write_conf
  elif [ ! -s "$CONF" ]; then die "daemons run but $CONF is gone: run '$0 down' first"; fi
  hosts hosts_add
  pid_of munged >/dev/null || { rm -f "$D"/munge/munge.socket*
    spawn munged "$(command -v munged)" --foreground --force --num-threads=4 --key-file="$D/etc/munge.key" \
      --socket="$D/munge/munge.socket" --pid-file="$D/munge/munged.pid" --seed-file="$D/munge/seed" \
      --log-file="$D/log/munged.log"; }
  wait_for 10 munge_ok || { logs; die "munged did not come up"; }
  if ! pid_of slurmctld >/dev/null; then
    if [ $any = 0 ] && [ "$SLURM_DEV_KEEP" != 1 ]; then spawn slurmctld "$(command -v slurmctld)" -D -c -i -f "$CONF"
    else spawn slurmctld "$(command -v slurmctld)" -D -i -f "$CONF"; fi
  fi
  for n in $(nodes); do start_node "$n"; done
  wait_for 60 ready_or_dead || true
  nodes_ok || {
    c=$(dead) && say "$c died: see $D/log/$c.*"
    sinfo -a -N -l >&2 || true; logs; die "nodes did not become idle in 60 s"
  }
  say "up: $SLURM_DEV_NODES nodes x $SLURM_DEV_GPUS fake $SLURM_DEV_GPU_TYPE; eval \"\$($0 env)\""
}
munge_ok() { munge -n --socket="$D/munge/munge.socket" | unmunge --socket="$D/munge/munge.socket"; }

down() {
  local n s
  mkdir -p "$D"; exec 9> "$D/.lock"; flock -w 60 9 || die "another dev-cluster.sh holds $D/.lock"
  if pid_of slurmctld >/dev/null && [ "$SLURM_DEV_KEEP" != 1 ]; then
    for s in PENDING RUNNING SUSPENDED; do timeout 5 scancel --state=$s 2>/dev/null || true; done
    wait_for 8 queue_empty || true
  fi
  for n in "$D"/run/slurmd-*.pid; do
    [ -e "$n" ] || continue
    n=${n##*/}; n=${n%.pid}; case $n in *.own) ;; *) stop "$n" ;; esac
  done
  stop slurmctld; stop munged
  reap
  hosts hosts_del
  rm -rf "$D/run" "$D/munge"      # logs, conf and state stay for inspection; the next `up` wipes state and logs
}
queue_empty() { [ -z "$(timeout 5 squeue -h -a -t PD,R,CG,S 2>/dev/null)" ]; }

status() {
  local n p rc=0; for n in $(names); do
    p=$(state_of "$n"); echo "$n $p $(pid_of "$n" || true)"; [ "$p" = running ] || rc=1
  done
  if pid_of slurmctld >/dev/null; then timeout 10 sinfo -a -N -o '%N %T %G %c %m' || rc=1; nodes_ok || rc=1; fi
  return $rc
}

final() {
  local id=$1 end=$((SECONDS + ${2:-300})) j s
  local ended='COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|PREEMPTED'
  while :; do
    j=$(scontrol -o show job "$id" 2>/dev/null || true)
    [ -n "$j" ] || die "no such job: $id"
    s=$(grep -oP '(?<= JobState=)\S+' <<<"$j" | sort -u)
    grep -qvxE "$ended" <<<"$s" || break
    [ $SECONDS -lt $end ] || { say "job $id still: $(tr '\n' ' ' <<<"$s")"; return 124; }
    sleep 0.3
  done
  awk '{delete a; for (i=1;i<=NF;i++){k=index($i,"="); if(k) {n=substr($i,1,k-1); if(!(n in a)) a[n]=substr($i,k+1)}}
        id=a["JobId"]; if ("ArrayTaskId" in a) id=a["ArrayJobId"]"_"a["ArrayTaskId"]
        if ("HetJobOffset" in a) id=a["HetJobId"]"+"a["HetJobOffset"]
        print id, a["JobState"], a["ExitCode"], a["Restarts"]}' <<<"$j"
  [ "$s" = COMPLETED ]
}

install() {
  command -v apt-get >/dev/null || die "no apt-get here: install slurmctld, slurmd, Slurm's commands and munge yourself"
  [ "$(id -u)" = 0 ] || die "'install' must be run as root: sudo $0 install"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge
}
usage() { sed -n '2,/^set -/{s/^# \{0,1\}//;/^set -/d;p}' "$0"; }
is_node() { grep -qxF -- "$1" <<<"$(nodes)" || die "no node '$1'; there are: $(nodes | paste -sd' ')"; }

if [ -s "$CONF" ] && { [ "${1:-}" != up ] || pid_of slurmctld >/dev/null; }; then
  SLURM_DEV_NODES=$(grep -c '^NodeName=' "$CONF")   # of a cluster that is there, whatever this call's environment says
fi
case ${1:-} in
  install) install ;;
  up) up ;;
  down) down ;;
  status) status ;;
  env) printf 'export SLURM_CONF=%q SLURM_DEV_DIR=%q\n' "$CONF" "$D" ;;
  final) [ -n "${2:-}" ] || die "final JOBID [SECONDS]"; final "$2" "${3:-}" ;;
  node-crash) is_node "${2:-}"; SIG=STOP reap "$2"; SIG=STOP reap "$2"; down_now "$2" "${3:-}" ;;
  node-kill) is_node "${2:-}"; SIG=STOP reap "$2"; reap "$2"; rm -f "$D/run/slurmd-$2.pid"; down_now "$2" "${3:-}" ;;
  slurmd-kill) is_node "${2:-}"; stop "slurmd-$2" KILL ;;
  node-start) is_node "${2:-}"; n=$2
    [ "$(state_of "slurmd-$n")" != frozen ] || { reap "$n"; rm -f "$D/run/slurmd-$n.pid"; }
    start_node "$n"; wait_for 30 node_ok "$n" || die "$n did not come back: $(sinfo -h -N -n "$n" -o '%T %E')" ;;
  -h|--help|help) usage ;;
  *) usage; exit 2 ;;
esac
