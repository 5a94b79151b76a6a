// data: data sets, files of records, and a loader that prepares batches ahead.
#pragma once

#include <lockstep/dataset.h>
#include <lockstep/loader.h>
#include <lockstep/records.h>
#include <lockstep/torch_data.h>
