SELECT handwritten.place_order(@key@, @digest@, @request@);
