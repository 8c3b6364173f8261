INSERT INTO bare.orders (customer, amount, items) VALUES (@customer@, 12.50, @items@) RETURNING id;
