// Sockets over TCP, on exactly the address asked for.
#pragma once

#include <string>

#include "base/posix.h"

namespace lockstep {

// A socket that listens on the name's address; nothing, with errno, if none of its addresses is
// free and of this host. Throws SystemError if the name is not known.
Fd listen_at(const std::string& host, int port);

// A non-blocking socket that is being connected to one of the name's addresses, with each `attempt`
// to the next; nothing, with errno, if that cannot even begin. Throws SystemError if the name is
// not known.
Fd start_connecting(const std::string& host, int port, int attempt = 0);

}  // namespace lockstep
