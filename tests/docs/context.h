// What every page's fragments may use without saying so.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

using namespace std::chrono_literals;
