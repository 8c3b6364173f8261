// Telling systemd how this service is, where systemd runs it.
#pragma once

namespace retrysafe::relay {

// "READY=1", "STOPPING=1". Does nothing elsewhere.
void notify_service_manager(const char *state);

}  // namespace retrysafe::relay
