// LOCKSTEP_API: marks what a shared library of lockstep shows; everything else is hidden.
#pragma once

#define LOCKSTEP_API __attribute__((visibility("default")))
