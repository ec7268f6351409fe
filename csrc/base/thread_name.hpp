// Names of threads for top -H, perf, gdb and /proc.
#pragma once

#include <sys/prctl.h>

namespace infinity {

// Names the calling thread; the system keeps 15 characters.
inline void name_thread(const char* name) { prctl(PR_SET_NAME, name); }

}  // namespace infinity
