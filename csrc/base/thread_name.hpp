// Names of threads, as top -H, perf, gdb and /proc show them.
#pragma once

#include <sys/prctl.h>

namespace infinity {

// Of the calling thread; the system keeps 15 characters.
inline void name_thread(const char* name) { prctl(PR_SET_NAME, name); }

}  // namespace infinity
