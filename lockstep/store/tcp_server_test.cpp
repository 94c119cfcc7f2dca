// A TcpStore's server against clients that mean no good.
#include <gtest/gtest.h>
