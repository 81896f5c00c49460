// Counting calls that are not implemented.
#pragma once

#include <cuda.h>
#include <stdint.h>

CUresult not_implemented(const char* name);  // counts it; NOT_SUPPORTED
int call_error(const char* name);            // NOT_SUPPORTED in its library
void call_count(uint32_t* counter);
int late_index(const char* name);  // of a call that no library named; -1: no room
int late_stub(int index);
