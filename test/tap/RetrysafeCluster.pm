# A cluster that has retrysafe preloaded. scripts/check names a file with the settings that let a server find the
# staged extension (RETRYSAFE_SETTINGS); without it the installed one is used.
package RetrysafeCluster;

use strict;
use warnings;

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time sleep);

our @EXPORT =
  qw(retrysafe_node add_destination emit emit_in delivered delivered_within worker_pid tell forget_told kill_process
  balance no_crash);

# A node that is initialised and configured, not started. `init` goes to init().
sub retrysafe_node
{
	my ($name, %init) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);
	$node->init(%init);
	if (my $file = $ENV{RETRYSAFE_SETTINGS})
	{
		$node->append_conf('postgresql.conf', slurp_file($file));
	}
	$node->append_conf('postgresql.conf', <<'CONF');
shared_preload_libraries = 'retrysafe'
retrysafe.poll_interval = 200ms
max_prepared_transactions = 10
CONF
	return $node;
}

# The extension and a destination of the test kind `null`, which writes what it delivers to a file. May be given:
# `options` of the destination, and the `database`.
sub add_destination
{
	my ($node, $name, %given) = @_;
	my $file = $node->basedir . "/$name.out";
	my $control = $node->basedir . "/$name.control";
	my $options = defined $given{options} ? ", $given{options}" : '';
	$node->safe_psql($given{database} // 'postgres', <<SQL);
CREATE SCHEMA IF NOT EXISTS retrysafe;
CREATE EXTENSION IF NOT EXISTS retrysafe SCHEMA retrysafe;
SELECT retrysafe.outbox_register_kind('null', 'retrysafe_null',
  '[{"name": "file", "type": "string"}, {"name": "control", "type": "string"}, {"name": "delay_ms", "type": "integer"},
    {"name": "parallel", "type": "integer"}]');
SELECT retrysafe.outbox_create_destination('$name', 'null', '{"file": "$file", "control": "$control"$options}');
SQL
	return $file;
}

# What becomes of attempts from now on, until it is forgotten.
sub tell
{
	my ($node, $name, $word) = @_;
	append_to_file($node->basedir . "/$name.control", $word);
}

sub forget_told
{
	my ($node, $name) = @_;
	unlink $node->basedir . "/$name.control" or die "nothing was told: $!";
}

sub emit
{
	my ($node, @keys) = @_;
	emit_in($node, 'postgres', @keys);
}

sub emit_in
{
	my ($node, $database, @keys) = @_;
	$node->safe_psql($database, join '', map { "SELECT retrysafe.outbox_emit(NULL, '$_', 't', '{}');" } @keys);
}

# Event keys in the order in which they were delivered, copies included.
sub delivered
{
	my ($file) = @_;
	return () unless -e $file;
	return map { my @part = split / /; $part[4] == 0 ? $part[2] : () } split /\n/, slurp_file($file);
}

# Polls until exactly these were delivered; the time that it took, undef when it took longer than `seconds`.
sub delivered_within
{
	my ($file, $seconds, @keys) = @_;
	my $began = time;
	while (1)
	{
		return time - $began if join(' ', delivered($file)) eq join(' ', @keys);
		last if time - $began > $seconds;
		sleep 0.02;
	}
	diag 'delivered: ' . join ' ', delivered($file);
	return undef;
}

sub worker_pid
{
	my ($node) = @_;
	my $query = q(SELECT pid FROM pg_stat_activity WHERE backend_type = 'retrysafe worker' AND datname = 'postgres');
	$node->poll_query_until('postgres', "SELECT count(*) = 1 FROM ($query) AS w") or die 'no worker';
	return $node->safe_psql('postgres', $query);
}

my %killed;

sub kill_process
{
	my ($pid) = @_;
	$killed{$pid} = 1;
	kill 'KILL', $pid;
}

# Committed events = what the destination delivered to the file at least once + pending + dead-lettered, and nothing else
# was delivered; as balance() in test/system/closing.py. May be given: the `database`, and an array of event keys that
# are still `pending`.
sub balance
{
	my ($node, $name, $file, %given) = @_;
	my %arrived = map { my @part = split / /; $part[4] == 0 ? ($part[1] => 1) : () }
	  -e $file ? split(/\n/, slurp_file($file)) : ();
	my @rows = split /\n/, $node->safe_psql($given{database} // 'postgres', <<SQL);
SELECT e.event_id,
       CASE WHEN EXISTS (SELECT FROM retrysafe.outbox_dead_letters l WHERE l.destination = d.name AND l.id = e.id) THEN 'dead'
            WHEN r.at IS NULL THEN 'unwanted' WHEN isfinite(r.at) THEN 'recorded' ELSE 'open' END,
       e.event_key
  FROM retrysafe.outbox_destinations d
 CROSS JOIN retrysafe.outbox_events e
 CROSS JOIN LATERAL retrysafe.outbox_recorded_at(d.destination, d.shards, d.event_types, e.id, e.txid, e.event_type,
                                                 e.ordering_key) AS r (at)
 WHERE d.name = '$name';
SQL
	my (@lost, @pending);
	for (@rows)
	{
		my ($id, $fate, $key) = split /\|/, $_, 3;
		next if delete $arrived{$id};
		push @lost, $key if $fate eq 'recorded';
		push @pending, $key if $fate eq 'open';
	}
	is(join(' ', @lost), '', "$name: what is recorded as delivered arrived");
	is(join(' ', sort @pending), join(' ', sort @{ $given{pending} // [] }), "$name: what is pending");
	is(join(' ', sort keys %arrived), '', "$name: only what was committed was delivered");
}

# Ends the nodes that still run by a fast stop. No process of theirs crashed, before and then.
sub no_crash
{
	for my $node (@_)
	{
		$node->stop('fast') if defined $node->{_pid};
		my @crashes = grep {
			/PANIC:|TRAP:|terminate called/ || (/\(PID (\d+)\) was terminated by signal/ && !$killed{$1})
		} split /\n/, slurp_file($node->logfile);
		is(join("\n", @crashes), '', $node->name . ': no process crashed');
	}
}

1;
