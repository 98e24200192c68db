#!/usr/bin/env bash
# Certificates, keys and secrets of a federation, in a folder for each role, with openssl and ssh-keygen alone:
#
#   docker/certs.sh certs --nodes 3 --hosts fl.example.org,192.0.2.7   # a new set, for 365 days, and .env
#   docker/certs.sh certs --add 4                                      # keys of one more node
#   docker/certs.sh certs --renew --days 730                           # new certificates for the same keys
#
# ca/            ca.key signs all certificates and has no other use. Do not copy it to the machines.
# superlink/     server.crt, server.key, superexec.secret
# serverapp/     superexec.secret
# channel/       server.crt, server.key of FedTAN's channel (fedtan-tls-dir)
# cli/           node-N.pub, to register the nodes
# node-N/        node.key (the node's identity), server.crt, server.key, superexec.secret
# clientapp-N/   superexec.secret
#
# Each folder except ca/ also has ca.crt, which verifies the certificates of other roles. A SuperExec and its SuperLink or
# SuperNode have the same secret. All keys are elliptic-curve keys on P-384, as Flower requires for nodes.
set -euo pipefail
umask 077
keys=certs nodes=3 hosts= days=365 add= renew= env=.env
fail() { echo "make certs: $*" >&2; exit 1; }
while [ $# -gt 0 ]; do
  case $1 in
    --nodes) nodes=$2; shift ;;
    --hosts) hosts=$2; shift ;;
    --days) days=$2; shift ;;
    --add) add=$2; shift ;;
    --env) env=$2; shift ;;
    --renew) renew=yes ;;
    -*) fail "unknown option $1" ;;
    *) keys=$1 ;;
  esac
  shift
done
for number in "$nodes" "$days" "${add:-1}"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || fail "$number: numbers of nodes and days are 1 or more"
done
host_of_channel=superexec-serverapp  # the service of docker-compose.yml whose ServerApp opens FedTAN's channel

# The names of a certificate for openssl, with those of this machine: names "superlink" "fl.example.org,192.0.2.7"
names() {
  local name text=
  for name in ${1//,/ } ${2//,/ } localhost 127.0.0.1 ::1; do
    case $name in *:* | [0-9]*.[0-9]*.[0-9]*.[0-9]*) text+=,IP:$name ;; *) text+=,DNS:$name ;; esac
  done
  echo "${text:1}"
}

# Only .crt and .pub are for everybody. A file is complete when it has its name.
new_key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out "$1" 2>/dev/null; }
signed() {  # signed SUBJECT KEY EXTENSIONS CERTIFICATE [option of openssl x509 ...]
  local extensions
  extensions=$(mktemp)
  printf '%s\n' subjectKeyIdentifier=hash "$3" > "$extensions"
  openssl req -new -key "$2" -subj "/CN=$1" -config <(printf '[req]\ndistinguished_name=dn\n[dn]\n') |
    openssl x509 -req -sha384 -days "$days" -set_serial "0x$(openssl rand -hex 16)" -extfile "$extensions" "${@:5}" \
      -out "$4.new" 2>/dev/null
  rm "$extensions"
  chmod 644 "$4.new"
  mv "$4.new" "$4"
}
authority() {  # authority CERTIFICATE: path length 0, so that a signed certificate cannot sign others
  signed "fedbn-flwr federation CA" "$keys/ca/ca.key" \
    $'authorityKeyIdentifier=keyid\nbasicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign' \
    "$1" -signkey "$keys/ca/ca.key"
}
server() {  # server FOLDER NAMES: the certificate of the server with this folder's key
  local first=${2%%,*}
  signed "${first#*:}" "$1/server.key" \
    "authorityKeyIdentifier=keyid"$'\n'"basicConstraints=critical,CA:FALSE"$'\n'"extendedKeyUsage=serverAuth"$'\n'"subjectAltName=$2" \
    "$1/server.crt" -CA "$keys/ca/ca.crt" -CAkey "$keys/ca/ca.key"
}
role() {  # role FOLDER [SECRET] [NAMES]: ca.crt, and the secret and the server's files that the role needs
  mkdir -p "$1"
  install -m 644 "$keys/ca/ca.crt" "$1/ca.crt"
  if [ -n "${2-}" ]; then install -m 600 "$2" "$1/superexec.secret"; fi
  if [ -n "${3-}" ]; then new_key "$1/server.key"; server "$1" "$3"; fi
}
node() {
  local own=$keys/node-$1 secret
  secret=$(mktemp)
  openssl rand -out "$secret" 32
  # The certificate of a node does not have the server's names: the node could then claim to be the server.
  role "$own" "$secret" "$(names "supernode-$1" "")"
  ssh-keygen -q -t ecdsa -b 384 -N "" -C "node-$1" -f "$own/node.key"
  mv "$own/node.key.pub" "$keys/cli/node-$1.pub"  # the server registers the node with its public key
  chmod 644 "$keys/cli/node-$1.pub"
  role "$keys/clientapp-$1" "$secret"
  rm "$secret"
}

if [ -n "$add$renew" ] && [ ! -f "$keys/ca/ca.key" ]; then
  fail "$keys/ca/ca.key is missing, but it signs certificates. Name the folder of \`make certs\`."
fi
if [ -n "$add" ]; then
  for path in "$keys/node-$add" "$keys/clientapp-$add" "$keys/cli/node-$add.pub"; do
    if [ -e "$path" ]; then fail "node $add has keys: $path. To make new keys, remove these first."; fi
  done
  node "$add"
  done="node-$add, clientapp-$add and cli have new files"
elif [ -n "$renew" ]; then
  # The authority keeps its key and its name, so old and new certificates verify each other.
  authority "$keys/ca/ca.crt"
  for path in "$keys"/*/ca.crt; do
    if [ "$path" != "$keys/ca/ca.crt" ]; then install -m 644 "$keys/ca/ca.crt" "$path"; fi
  done
  for path in "$keys"/*/server.crt; do
    folder=$(dirname "$path")
    now=$(openssl x509 -in "$path" -noout -text |
      sed -n '/Subject Alternative Name/{n;s/IP Address:/IP:/g;s/ //g;p;}')
    if [ -n "$hosts" ]; then
      case $(basename "$folder") in
        superlink) now=$(names superlink "$hosts") ;;
        channel) now=$(names $host_of_channel "$hosts") ;;
      esac
    fi
    server "$folder" "$now"
  done
  done="new certificates, valid for $days days"
else
  if [ -e "$keys" ] && { [ ! -d "$keys" ] || [ -n "$(ls -A "$keys")" ]; }; then
    fail "$keys is in use, and keys are never overwritten, since running nodes depend on them. --add N makes keys of one" \
      "more node, --renew new certificates for the same keys. For a new set, name another folder."
  fi
  (umask 022; mkdir -p "$keys")
  mkdir "$keys/ca"
  new_key "$keys/ca/ca.key"
  authority "$keys/ca/ca.crt"
  shared=$(mktemp)
  openssl rand -out "$shared" 32
  role "$keys/superlink" "$shared" "$(names superlink "$hosts")"
  role "$keys/serverapp" "$shared"
  rm "$shared"
  role "$keys/channel" "" "$(names $host_of_channel "$hosts")"
  role "$keys/cli"
  for number in $(seq "$nodes"); do node "$number"; done
  done="a folder for each role. Keep $keys/ca secret"
fi

# The containers run as the owner of the keys, because nobody else can read the keys. Containers never run as root.
user=$(id -u) group=$(id -g)
if [ "$user" = 0 ]; then
  user=1000 group=1000
  for path in "$keys"/*; do
    if [ "$path" != "$keys/ca" ]; then chown -R $user:$group "$path"; fi
  done
fi
added=
[ -e "$env" ] || install -m 644 /dev/null "$env"
if [ -s "$env" ] && [ -n "$(tail -c 1 "$env")" ]; then echo >> "$env"; fi
for variable in FEDBN_UID=$user FEDBN_GID=$group COMPOSE_PROFILES=cpu; do
  if ! grep -qsE "^(export )?${variable%%=*}=" "$env"; then
    echo "$variable" >> "$env"
    added+=" ${variable%%=*}"
  fi
done
echo "$keys: $done."
echo "$env:${added:- nothing to add}"
