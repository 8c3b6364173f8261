-- The business table: each subject has one of its own, in its schema.
CREATE TABLE orders (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  customer text NOT NULL,
  amount numeric NOT NULL,
  items text NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
);
