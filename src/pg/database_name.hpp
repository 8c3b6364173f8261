// The name of this database, for those outside.
#pragma once

namespace retrysafe::pg {

// In the encoding of the database, and such that it can be told in UTF-8: where it cannot, what is not ASCII
// is "?". Names are in a catalog that all databases share, each written in the encoding of the database that
// it was given in.
const char *own_database_name();

}  // namespace retrysafe::pg
