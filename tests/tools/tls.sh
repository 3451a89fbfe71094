#!/usr/bin/env bash
# Writes tests/fixtures/tls: a certificate that no host trusts, and its key, for a server in tests.
set -euo pipefail
out=$(cd "$(dirname "$0")/../fixtures" && pwd)/tls
pem=$(mktemp -d)
trap 'rm -rf "$pem"' EXIT
mkdir -p "$out"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 36500 -subj "/CN=test of megaburn" \
    -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE \
    -keyout "$pem/key.pem" -out "$pem/cert.pem"
openssl x509 -in "$pem/cert.pem" -outform der -out "$out/cert.der"
openssl pkcs8 -topk8 -nocrypt -in "$pem/key.pem" -outform der -out "$out/key.der"
