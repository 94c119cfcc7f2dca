// Communication with other processes: sockets with deadlines, the job secret and its handshake, local sockets
// that pass descriptors, and shared memory. Thread safety: stated in each header.
//
//   address.h         an Internet address and port
//   socket.h          a TCP connection, a listener
//   secret.h          the 32 bytes that all processes of a job share
//   handshake.h       both sides of a connection prove that they know them, and agree on keys
//   peer_handshake.h  the messages around it: introduction, welcome or refusal
//   sealed.h          encrypted and authenticated records
//   channel.h         a client's connection, sealed once there are keys
//   unix_socket.h     messages and descriptors between processes of one host
//   segment.h         sealed shared memory
#pragma once

#include "lockstep/net/address.h"
#include "lockstep/net/channel.h"
#include "lockstep/net/handshake.h"
#include "lockstep/net/peer_handshake.h"
#include "lockstep/net/sealed.h"
#include "lockstep/net/secret.h"
#include "lockstep/net/segment.h"
#include "lockstep/net/socket.h"
#include "lockstep/net/unix_socket.h"
