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
  qw(retrysafe_node add_destination emit emit_in delivered delivered_within worker_pid tell forget_told);

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

1;
