// The one include a program needs.
#pragma once

#include <lockstep/backend.h>
#include <lockstep/error.h>
#include <lockstep/world.h>
