SELECT handwritten_plus.place_order(@key@, @digest@, @request@);
