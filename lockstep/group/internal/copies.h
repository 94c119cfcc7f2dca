// Copies of lockstep in one process. Two shared libraries that each contain the static library have two
// default worlds that know nothing of each other: one is initialised, the other says that it is not. Nothing
// links the copies, since their symbols are hidden; so each carries an ELF note, which the dynamic linker
// maps with its object and which leads to a word of that copy's memory. Torch-free. Private to group/. Thread
// safety: any thread.
#pragma once

#include <string>

namespace lockstep::internal {

// The default world of this process was entered or left by this copy; worlds of rank threads do not count.
void note_process_world(bool entered);

// Where another copy of lockstep has initialised its default group: "/opt/app/libtrainer.so", or the
// program's path. "" when there is none. Looks through the loaded objects: for errors and for
// init_process_group only.
std::string other_copy_in_use();

// The file that holds this copy.
std::string this_copy();

// What to do about it, for messages.
inline constexpr const char* kCopiesAdvice =
    "each copy has its own default group: link both with lockstep's shared library (BUILD_SHARED_LIBS=ON), "
    "or let one "
    "of them hand Group and Work to the other";

}  // namespace lockstep::internal
