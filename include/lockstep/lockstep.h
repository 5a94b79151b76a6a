// The one include a program needs.
#pragma once

#include <lockstep/amp.h>
#include <lockstep/averaging.h>
#include <lockstep/backend.h>
#include <lockstep/checkpoint.h>
#include <lockstep/comm_hook.h>
#include <lockstep/data.h>
#include <lockstep/ddp.h>
#include <lockstep/elastic.h>
#include <lockstep/error.h>
#include <lockstep/functional.h>
#include <lockstep/metrics.h>
#include <lockstep/optim.h>
#include <lockstep/pending.h>
#include <lockstep/sampler.h>
#include <lockstep/seed.h>
#include <lockstep/sharded.h>
#include <lockstep/sync_batch_norm.h>
#include <lockstep/world.h>
