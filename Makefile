# retrysafe: PGXS build.   make · make install · make installcheck
#
#   PG_CONFIG=/path/to/pg_config   the server to build for
#   SINKS="http postgres"          which destination modules to build; by default those whose client library is here
#   FAULT_POINTS=1                 test builds: named places that fail on command
#   NULL_SINK=1                    the test sink without them: what benchmarks measure
#   WERROR=1                       warnings are errors (what CI does)

EXTENSION    = retrysafe
EXT_VERSION := $(shell sed -n "s/^default_version = '\(.*\)'/\1/p" retrysafe.control)
MODULE_big   = retrysafe
source_list  = $(shell awk '$$1 == "$(1)" { print $$2 }' src/sources.txt)
core_objects   := $(patsubst %.cpp,%.o,$(call source_list,core))
server_objects := $(patsubst %.cpp,%.o,$(filter %.cpp,$(call source_list,server)))
OBJS         = $(core_objects) $(server_objects)
DATA         = $(wildcard src/sql/retrysafe--*--*.sql)
DATA_built   = src/sql/retrysafe--$(EXT_VERSION).sql

REGRESS      = $(sort $(patsubst sql/%.sql,%,$(wildcard sql/*.sql)))
ISOLATION    = $(sort $(patsubst test/isolation/specs/%.spec,%,$(wildcard test/isolation/specs/*.spec)))
ISOLATION_OPTS = --inputdir=test/isolation --outputdir=build/isolation
REGRESS_OPTS = --outputdir=build/regress

# Where systemd looks, for a server that belongs to the system.
systemd_unit_dir ?= $(if $(filter /usr/%,$(bindir)),/usr,$(patsubst %/bin,%,$(bindir)))/lib/systemd/system

# The null sink misbehaves on command: for tests and benchmarks only.
ifndef SINKS
kinds       := $(sort $(filter-out core server relay $(if $(FAULT_POINTS)$(NULL_SINK),,null),$(shell awk '$$2 ~ /\.cpp$$/ { print $$1 }' src/sources.txt)))
missing_of   = $(foreach package,$(patsubst pkg:%,%,$(filter pkg:%,$(call source_list,$(1)))),$(shell pkg-config --exists $(package) || echo $(package)))
$(foreach kind,$(kinds),$(eval missing_$(kind) := $(call missing_of,$(kind))))
$(foreach kind,$(kinds),$(if $(missing_$(kind)),$(info destinations of kind "$(kind)" are left out: pkg-config does not find $(missing_$(kind)))))
SINKS       := $(foreach kind,$(kinds),$(if $(missing_$(kind)),,$(kind)))
endif
sink_modules = $(foreach sink,$(SINKS),retrysafe_$(sink).so)

EXTRA_CLEAN  = src/sql/retrysafe--$(EXT_VERSION).sql $(sink_modules) build/regress build/isolation \
               $(wildcard src/sinks/*.o src/sinks/*.d) \
               $(foreach sink,$(SINKS),$(wildcard src/sinks/$(sink)/*.o src/sinks/$(sink)/*.d)) \
               $(OBJS:.o=.d) retrysafe-relay $(wildcard src/relay/*.o src/relay/*.d)

PG_CONFIG   ?= pg_config
# The server's headers are system headers: they do not compile without warnings, our own code does.
PG_CPPFLAGS  = -isystem $(shell $(PG_CONFIG) --includedir-server) -Isrc -DRETRYSAFE_VERSION='"$(EXT_VERSION)"'
PG_CXXFLAGS  = -std=c++20 -fvisibility=hidden -fvisibility-inlines-hidden \
               -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wold-style-cast -MMD -MP
ifdef WERROR
PG_CXXFLAGS += -Werror
endif
ifdef FAULT_POINTS
PG_CPPFLAGS += -DRETRYSAFE_FAULT_POINTS -D_GLIBCXX_ASSERTIONS
endif
# Before 16 the server leaves PGDLLEXPORT empty, and hidden visibility would hide even Pg_magic_func.
ifneq ($(filter 14 15,$(shell $(PG_CONFIG) --version | sed 's/[^0-9]*\([0-9]*\).*/\1/')),)
PG_CPPFLAGS += -DPGDLLEXPORT='__attribute__((visibility("default")))'
endif
exports      = -Wl,--version-script=src/exports.map
SHLIB_LINK  += $(exports) $(filter -l%,$(call source_list,server)) -lstdc++

# Objects are made again when the flags change: fault points, another server, another compiler.
flags = $(CXX) $(filter-out -Werror,$(PG_CPPFLAGS) $(PG_CXXFLAGS))
ifneq ($(filter-out clean distclean installcheck,$(or $(MAKECMDGOALS),all)),)
ifneq ($(file <build/flags),$(flags))
$(shell mkdir -p build)
$(file >build/flags,$(flags))
endif
endif

# Bitcode of C++ that uses exceptions gains nothing, and needs the very clang of the server's build.
override with_llvm = no
PGXS        := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

# The install script is its parts, in the order of their numbers. The library knows of how many pieces a ring is made.
src/sql/retrysafe--$(EXT_VERSION).sql: $(sort $(wildcard src/sql/install/*.sql)) retrysafe.control src/pg/extension.hpp
	sed "s/@ring_pieces@/$$(sed -n 's/.* kRingPieces = \([0-9]*\);.*/\1/p' src/pg/extension.hpp)/g" $(filter %.sql,$^) > $@

# Each destination kind is a library of its own, so that no client library is ever mapped into a user's backend.
define sink_rule
sink_objects_$(1) := $$(patsubst %.cpp,%.o,$$(filter %.cpp,$$(call source_list,$(1))) $$(call source_list,core))
retrysafe_$(1).so: $$(sink_objects_$(1))
	$$(CXX) -shared $$(LDFLAGS) $$(exports) -o $$@ $$(filter %.o,$$^) $$(filter -l%,$$(call source_list,$(1)))
endef
$(foreach sink,$(SINKS),$(eval $(call sink_rule,$(sink))))

# The relay is a program for any machine. Without libpq's headers it is left out.
ifneq ($(wildcard $(shell $(PG_CONFIG) --includedir)/libpq-fe.h),)
relay_program = retrysafe-relay
endif
relay_objects = $(patsubst %.cpp,%.o,$(filter %.cpp,$(call source_list,relay)))
retrysafe-relay: $(relay_objects) $(core_objects)
	$(CXX) $(LDFLAGS) -pie -o $@ $(filter %.o,$^) $(filter -l%,$(call source_list,relay)) -ldl
src/relay/%.o: override CPPFLAGS += -isystem $(shell $(PG_CONFIG) --includedir) -DRETRYSAFE_LIBDIR='"$(pkglibdir)"'

src/sinks/connector.o src/sinks/postgres/%.o: override CPPFLAGS += -isystem $(shell $(PG_CONFIG) --includedir)

all: $(sink_modules) $(relay_program)
$(MODULE_big).so $(sink_modules): src/exports.map src/sources.txt
$(OBJS) $(foreach sink,$(SINKS),$(sink_objects_$(sink))) $(relay_objects): build/flags
installcheck: | build
build:
	$(MKDIR_P) $@
install: install-sinks install-relay
install-relay: $(relay_program)
ifdef relay_program
	$(MKDIR_P) '$(DESTDIR)$(bindir)' '$(DESTDIR)$(systemd_unit_dir)'
	$(INSTALL_PROGRAM) $(relay_program) '$(DESTDIR)$(bindir)/'
	sed 's|@bindir@|$(bindir)|' src/relay/retrysafe-relay@.service >'$(DESTDIR)$(systemd_unit_dir)/retrysafe-relay@.service'
endif
install-sinks: $(sink_modules)
	$(MKDIR_P) '$(DESTDIR)$(pkglibdir)' '$(DESTDIR)$(includedir_server)/extension/retrysafe'
	$(foreach sink,$(SINKS),$(INSTALL_SHLIB) retrysafe_$(sink).so '$(DESTDIR)$(pkglibdir)/';)
	$(INSTALL_DATA) src/sink/abi.h '$(DESTDIR)$(includedir_server)/extension/retrysafe/retrysafe_sink.h'
uninstall: uninstall-sinks uninstall-relay
uninstall-relay:
	rm -f '$(DESTDIR)$(bindir)/retrysafe-relay' '$(DESTDIR)$(systemd_unit_dir)/retrysafe-relay@.service'
uninstall-sinks:
	rm -f $(foreach sink,$(SINKS),'$(DESTDIR)$(pkglibdir)/retrysafe_$(sink).so')
	rm -rf '$(DESTDIR)$(includedir_server)/extension/retrysafe'
.PHONY: install-sinks uninstall-sinks install-relay uninstall-relay

-include $(wildcard $(OBJS:.o=.d) src/relay/*.d src/sinks/*.d $(foreach sink,$(SINKS),$(wildcard src/sinks/$(sink)/*.d)))
