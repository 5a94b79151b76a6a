// The one name for JSON values. Who builds or reads them includes <nlohmann/json.hpp> as well.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace lockstep {

using Json = nlohmann::json;

}  // namespace lockstep
