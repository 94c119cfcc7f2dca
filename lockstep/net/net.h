// Talking to other processes: sockets with deadlines, the job secret and its handshake, local sockets that carry
// descriptors, and memory to share.
//
//   address.h         an Internet address and port
//   socket.h          a TCP connection, a listener
//   secret.h          the 32 bytes all processes of a job know
//   handshake.h       both sides of a connection prove that they know them, and agree on keys
//   peer_handshake.h  the messages around that by which two processes meet: who calls, welcome or refusal
//   sealed.h          records that nobody in between can read or change
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
